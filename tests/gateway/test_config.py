"""`gateway.toml`: what is right is taken as it was meant; what is wrong stops the start with file, line and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from quota.config import ConfigError
from quota.costs.rows import Request, fixed, id_count, minimum, page_limit, through_nodes
from quota.gateway.config import GatewayConfig, read_config
from quota.gateway.toml_lines import line_of
from quota.metering import Leasing
from tests.cli.conftest import said

WHOLE = """\
upstream = "http://127.0.0.1:9000/"
limits_path = "/v1/limits"

[headers]
style = "legacy"
drop = ["X-Tenant-Id"]

[oauth]
issuer = "https://id.example"
audience = "query-api"
jwks_file = "jwks.json"
algorithms = ["ES256", "RS256"]
user_claim = "sub"

[[routes]]
path = "/v1/tables"
estimate = { fixed = 1 }

[[routes]]
path = "/v1/series/<id>"
methods = ["GET", "POST"]
name = "series"
estimate = { minimum = [{ page_limit = 300, parameter = "size" }, { id_count = "ids", most = 50 }] }
unit = "cost"
minimum_charge = 2
failure_charge = 0
on_timeout = "hold"
overrun = "cap"
headroom = 0.2
max_targets = 10
period = ["since", "until"]
max_period = "31d"
upstream_timeout = "90s"
max_response_bytes = 5000000
fail_open = { capacity = 1000, refill_per_s = 10 }

[[routes]]
path = "/v1/nodes"
estimate = { through_nodes = { page_limit = 300 }, calls = 3 }

[[routes]]
path = "/public/<path:rest>"
metered = false
leased = false

[lease]
size = 3000
most = 9000
leaves = 0.75
from_per_s = 5
callers = 7
ttl = "40s"
idle = "4s"
post_every = "500ms"
"""


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], GatewayConfig]:
    """Reads a text as if it were the file."""

    def read_text(text: str) -> GatewayConfig:
        file = tmp_path / "gateway.toml"
        file.write_text(text)
        return read_config(file)

    return read_text


def test_everything_that_can_be_said(read: Callable[[str], GatewayConfig], tmp_path: Path) -> None:
    config = read(WHOLE)
    assert config.upstream == "http://127.0.0.1:9000"
    assert config.headers.drop == ("x-tenant-id",)
    assert config.oauth is not None
    assert config.oauth.algorithms == ("ES256", "RS256")
    assert config.folder == tmp_path
    tables, series, nodes, public = (table.route() for table in config.routes)
    assert (tables.estimate, tables.name) == (fixed(1), "/v1/tables")
    assert series.methods == ("GET", "POST")
    assert series.estimate == minimum(page_limit(300, "size"), id_count("ids", 50))
    assert (series.minimum_charge, series.failure_charge, series.on_timeout, series.overrun) == (2, 0, "hold", "cap")
    assert series.headroom == Decimal("0.2")
    assert len(series.bounds) == 2
    assert series.fail_open is not None
    assert (series.fail_open.capacity, series.fail_open.refill_per_s) == (1000, 10)
    limits = config.routes[1].limits()
    assert (limits.upstream_s, limits.response_bytes) == (90, 5_000_000)
    assert nodes.estimate == through_nodes(page_limit(300), 3)
    assert nodes.estimate(Request("GET", "/", "limit=100", {})) == 160
    assert not public.metered
    assert [route.leased for route in (tables, series, nodes, public)] == [True, True, True, False]
    assert config.lease is not None
    assert config.lease.leasing() == Leasing(
        size=3000, most=9000, leaves=Decimal("0.75"), from_per_s=5, callers=7, ttl=timedelta(seconds=40),
        idle=timedelta(seconds=4), post_every=timedelta(milliseconds=500),
    )  # fmt: skip
    plain = WHOLE.partition("[lease]")[0]
    assert read(plain).lease is None
    short = read(plain + "[lease]\nsize = 5\n")
    assert short.lease is not None
    assert short.lease.leasing() == Leasing(size=5)


def test_the_upstream_of_the_command_line_goes_first(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(WHOLE)
    assert read_config(file, upstream="https://db.example").upstream == "https://db.example"


def test_a_hold_outlives_what_its_call_may_take(read: Callable[[str], GatewayConfig]) -> None:
    config = read(WHOLE.replace('"90s"', '"1h"'))
    assert config.routes[1].route().ttl == timedelta(hours=2)
    assert config.routes[0].route().ttl == timedelta(minutes=10)


# What is changed in the file above, the line that is then named, and what is said.
MISTAKES = [
    ('upstream = "http://127.0.0.1:9000/"', "", 1, "upstream: it is missing; write it"),
    ('"http://127.0.0.1:9000/"', '"127.0.0.1:9000"', 1, '"127.0.0.1:9000" is no origin; write scheme, host and port'),
    ("9000/", "9000/v1", 1, "is no origin"),
    ("9000/", "900000", 1, "is no origin"),
    ("http://127", "http://user:pw@127", 1, "is no origin"),
    ('upstream = "http', 'upstream = http', 1, "correct the TOML there"),
    ('style = "legacy"', 'style = "old"', 5, '"old": input should be \'draft-11\', \'legacy\' or \'none\''),
    ('drop = ["X-Tenant-Id"]', 'drop = ["X Tenant"]', 6, "is no name of a header"),
    ("[headers]", "[header]", 4, "header: nothing has this name here"),
    ('issuer = "https://id.example"\n', "", 8, "oauth.issuer: it is missing"),
    ('jwks_file = "jwks.json"\n', "", 8, "write either jwks_url or jwks_file"),
    ('jwks_file = "jwks.json"', 'jwks_url = "http://id.example/keys"', 11, "write one with https"),
    ('"ES256", "RS256"', '"HS256"', 12, '"HS256" is no asymmetric algorithm'),
    ('"ES256", "RS256"', '"none"', 12, '"none" is no asymmetric algorithm'),
    ('["ES256", "RS256"]', "[]", 12, "should have at least 1 item"),
    ('path = "/v1/tables"', 'path = "v1/tables"', 16, '"v1/tables" is no path; write one that starts with /'),
    ('path = "/v1/tables"\n', "", 15, "routes.path: it is missing"),
    ("{ fixed = 1 }", "{ fixed = 0 }", 17, "fixed is 0; write a whole number from 1 on"),
    ("{ fixed = 1 }", "{ fixd = 1 }", 17, "is no estimate; write { page_limit = 300 }"),
    ("{ fixed = 1 }", "{ fixed = 1.5 }", 17, "is no estimate"),
    ("{ fixed = 1 }", "1", 17, "1 is no estimate"),
    ("{ fixed = 1 }", "{ fixed = 1, most = 2 }", 17, '"most" is nothing that this estimate takes'),
    ("{ fixed = 1 }", "{ minimum = [] }", 17, "is no estimate"),
    ("most = 50", 'most = "50"', 23, 'most is "50"; write a whole number'),
    ('"/v1/series/<id>"', '"/v1/series/<id"', 19, "write it as in Flask"),
    ('"/v1/nodes"', '"/v1/tables"', 37, '"/v1/tables" stands there twice'),
    ('path = "/v1/nodes"', 'path = "/v1/nodes"\nname = "series"', 37, 'the name "series" stands there twice'),
    ('["GET", "POST"]', '["get"]', 21, '"get" is no method that is passed on; write it in capitals'),
    ('["GET", "POST"]', '["CONNECT"]', 21, "is no method that is passed on"),
    ('["GET", "POST"]', '"GET"', 21, "should be a valid tuple"),
    ("minimum_charge = 2", "minimum_charge = -2", 25, "-2: input should be greater than or equal to 0"),
    ("minimum_charge = 2", "minimum_charge = 2.0", 25, "2.0: input should be a valid integer"),
    ("minimum_charge = 2", "minimal_charge = 2", 25, "minimal_charge: nothing has this name here"),
    ('on_timeout = "hold"', 'on_timeout = "release"', 27, "'charge' or 'hold'"),
    ("size = 3000", "size = 0", 47, "0: input should be greater than or equal to 1"),
    ("size = 3000\n", "", 46, "lease.size: it is missing"),
    ("most = 9000", "most = 900", 46, "most 900 is less than size, 3000"),
    ("leaves = 0.75", "leaves = 1", 49, "1 is no share; write 0 to below 1"),
    ("from_per_s = 5", "from = 5", 50, "from: nothing has this name here"),
    ('ttl = "40s"', 'ttl = "40"', 52, '"40" is no duration; write a number with its unit'),
    ('idle = "4s"', 'idle = "2d"', 46, "at most a day"),
    ("headroom = 0.2", "headroom = 1.5", 29, "1.5 is no share; write 0 to below 1"),
    ("max_targets = 10", "max_targets = 0", 30, "0: input should be greater than or equal to 1"),
    ('["since", "until"]', '["since"]', 31, "it is missing"),
    ('max_period = "31d"', 'max_period = "31"', 32, '"31" is no duration; write a number with its unit'),
    ('upstream_timeout = "90s"', "upstream_timeout = 90", 33, "90 is no duration"),
    ('upstream_timeout = "90s"', 'upstream_timeout = "0s"', 33, '"0s" is no duration'),
    ("capacity = 1000", "capacity = 0", 35, "0: input should be greater than or equal to 1"),
    ("metered = false", 'metered = "no"', 43, "input should be a valid boolean"),
    ("metered = false", "metered = fals", 43, "correct the TOML there"),
    (WHOLE[WHOLE.index("[[routes]]"):], "", 1, "routes: it is missing"),
    ('limits_path = "/v1/limits"', "keys = true\nkeys = false", 3, "correct the TOML there"),
]  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "line", "complaint"), MISTAKES)
def test_mistakes(
    read: Callable[[str], GatewayConfig], tmp_path: Path, right: str, wrong: str, line: int, complaint: str
) -> None:
    assert right in WHOLE
    with pytest.raises(ConfigError) as caught:
        read(WHOLE.replace(right, wrong, 1))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/gateway.toml:{line}: "), message
    assert complaint in message


def test_nobody_can_be_let_in(read: Callable[[str], GatewayConfig]) -> None:
    with pytest.raises(ConfigError, match="nobody can be let in"):
        read('keys = false\nupstream = "http://x"\n[[routes]]\npath = "/"\n')


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.toml: No such file or directory; give the gateway's TOML file"):
        read_config(tmp_path / "none.toml")


def test_check_shows_the_routes_and_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(WHOLE)
    shown = said(capsys, "gateway", "--config", str(file), "--check")
    assert shown.code == 0
    assert "series" in shown.out
    assert [line.split()[-2] for line in shown.out.splitlines() if line.startswith(("/v1/tables", "/public"))] == [
        "3000",
        "-",
    ]
    document = json.loads(said(capsys, "gateway", "--config", str(file), "--check", "--json").out)
    assert [route["name"] for route in document["routes"]][:2] == ["/v1/tables", "series"]
    assert [route["leased"] for route in document["routes"]] == [True, True, True, False]
    assert document["lease"] == {"size": 3000, "unit": "cost", "from_per_s": 5}
    file.write_text(WHOLE.replace("fixed = 1", "fixed = -1"))
    failed = said(capsys, "gateway", "--config", str(file))
    assert failed.code == 2
    assert failed.complaint.startswith(
        f"quota: {file}:17: routes.estimate: fixed is -1; write a whole number from 1 on"
    )


@pytest.mark.parametrize(
    ("place", "line"),
    [(("a",), 1), (("b", "c"), 4), (("b", "d"), 3), (("r", 0, "p"), 6), (("r", 1, "p"), 9), (("r", 1, "q"), 8),
     (("r", 1, "p", "x"), 9), (("nowhere",), 1), ((), 1), (("b", "a b"), 5)],
)  # fmt: skip
def test_lines(place: tuple[str | int, ...], line: int) -> None:
    text = 'a = 1\n# [b]\n[b] # the second\n  c.x = 2\n"a b" = 3\n[[r]]\np = 1\n[[r]]\np = 2\n'
    assert line_of(text.replace("[[r]]\np = 1", "[[r]]\np = 1", 1), place) == (7 if place == ("r", 0, "p") else line)
