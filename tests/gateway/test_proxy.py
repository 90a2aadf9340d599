"""The proxy end to end: a real gateway process, real connections, and the ledger's word on what became of each call."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gateway.conftest import Key, Proxy, make_key, settled, start, stop, until
from tests.gateway.upstream import BODY, COST, Upstream
from tests.server import Connection

CONFIG = """
upstream = "{upstream}"
connect_timeout = "5s"

[[routes]]
path = "/timeout/<path:rest>"
estimate = {{ fixed = 50 }}
upstream_timeout = "300ms"

[[routes]]
path = "/hang/<path:rest>"
estimate = {{ fixed = 50 }}
on_timeout = "hold"
upstream_timeout = "300ms"

[[routes]]
path = "/stall/<path:rest>"
estimate = {{ fixed = 50 }}
upstream_timeout = "300ms"

[[routes]]
path = "/small/<path:rest>"
estimate = {{ fixed = 50 }}
max_response_bytes = 10

[[routes]]
path = "/narrow/<path:rest>"
estimate = {{ fixed = 50 }}
max_targets = 2
max_period = "1d"

[[routes]]
path = "/free"
metered = false

[[routes]]
path = "/<path:rest>"
estimate = {{ fixed = 50 }}
"""


@pytest.fixture(scope="module")
def proxy(gateway_database: str, upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """The gateway in front of the upstream that does everything wrong."""
    running = start(tmp_path_factory.mktemp("gateway"), CONFIG.format(upstream=upstream.url), gateway_database)
    yield running
    assert stop(running) == 0


# Behaviour of the upstream, what the client sees, and what the ledger has: outcome and cost.
ENDS = [
    ("ok", 200, "ok", COST),
    ("exception", 500, "error", 1),
    ("before", 502, "error", 1),
    ("after", 502, "error", COST),
    ("middle", None, "error", COST),
    ("close", None, "error", COST),
    ("timeout", 504, "timeout", 1),
    ("hang", 504, "timeout", 50),
    ("stall", None, "timeout", COST),
]


@pytest.mark.parametrize("shape", ["whole", "stream"])
@pytest.mark.parametrize(("behaviour", "status", "outcome", "cost"), ENDS, ids=[end[0] for end in ENDS])
def test_every_end(
    proxy: Proxy, db: Connection, key: Key, behaviour: str, status: int | None, outcome: str, cost: int, shape: str
) -> None:
    """Whatever becomes of a call: no hold is left, it is settled once, and a part is never taken for the whole."""
    if status is None:
        # The answer has begun: it can only be cut short, and the client must see that.
        with pytest.raises((OSError, ValueError)):
            connection_error(proxy, f"/{behaviour}/{shape}", key)
    else:
        answer = proxy.request("GET", f"/{behaviour}/{shape}", headers=key.headers)
        assert answer.status == status
        if status == 200:
            assert answer.body == BODY
        elif status > 500:
            assert answer.problem in ("bad_gateway", "upstream_timeout")
    # What was settled with the head of a whole answer stays settled, however the rest goes.
    if shape == "whole" and status is None:
        assert settled(db, key) in ([("settled", cost, outcome)], [("settled", COST, "ok")])
    else:
        assert settled(db, key) == [("settled", cost, outcome)]
