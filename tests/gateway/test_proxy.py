"""The proxy end to end: a real gateway process, real connections, and the ledger's word on what became of each call."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

import aiohttp
import pytest

from tests.client.proxy import Proxy as DatabaseProxy
from tests.gateway.conftest import PATIENCE_S, Key, Proxy, make_key, settled, start, stop, until
from tests.gateway.upstream import BODY, COST, Upstream
from tests.server import Connection, connect

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
upstream_timeout = "120s"
estimate = {{ fixed = 50 }}
"""


@pytest.fixture(scope="module")
def proxy(gateway_database: str, upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """The gateway in front of the upstream that does everything wrong."""
    running = start(tmp_path_factory.mktemp("gateway"), CONFIG.format(upstream=upstream.url), gateway_database)
    yield running
    assert stop(running) == 0
    said = running.log.read_text()
    assert "Traceback" not in said
    assert "Unclosed" not in said


# Behaviour of the upstream, shape of its answer, what the client sees (None: an answer that is cut short), and what the
# ledger has: outcome and cost. A whole answer whose head tells its cost is settled with its head.
ENDS = [
    ("ok", "whole", 200, "ok", COST),
    ("ok", "stream", 200, "ok", COST),
    ("exception", "whole", 500, "error", 1),
    ("exception", "stream", 500, "error", 1),
    ("before", "whole", 502, "error", 1),
    ("before", "stream", 502, "error", 1),
    ("after", "whole", 502, "error", COST),
    ("after", "stream", 502, "error", COST),
    ("middle", "whole", None, "ok", COST),
    ("middle", "stream", None, "error", COST),
    ("close", "whole", None, "ok", COST),
    ("close", "stream", None, "error", COST),
    ("timeout", "whole", 504, "timeout", 1),
    ("hang", "stream", 504, "timeout", 50),
    ("stall", "whole", None, "ok", COST),
    ("stall", "stream", None, "timeout", COST),
]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("behaviour", "shape", "status", "outcome", "cost"), ENDS, ids=[f"{end[0]}-{end[1]}" for end in ENDS]
)
def test_every_end(
    proxy: Proxy, db: Connection, key: Key, method: str, behaviour: str, shape: str, status: int | None, outcome: str,
    cost: int,
) -> None:  # fmt: skip
    """Whatever becomes of a call: no hold is left, it is settled once, and a part is never taken for the whole."""
    body = b'{"ids": [1, 2, 3]}' if method == "POST" else None
    if status is None:
        with pytest.raises((OSError, HTTPException)):
            proxy.request(method, f"/{behaviour}/{shape}", body, key.headers)
    else:
        answer = proxy.request(method, f"/{behaviour}/{shape}", body, key.headers)
        assert answer.status == status
        if status == 200:
            assert answer.body == BODY
        elif status > 500:
            assert answer.problem in ("bad_gateway", "upstream_timeout")
    assert settled(db, key) == [("settled", cost, outcome)]


@pytest.mark.parametrize("shape", ["whole", "stream"])
@pytest.mark.parametrize("behaviour", ["linger", "pause"])
def test_a_client_that_leaves_takes_the_upstream_along(
    proxy: Proxy, upstream: Upstream, db: Connection, key: Key, behaviour: str, shape: str
) -> None:
    """Before the answer and in the middle of it: the upstream learns of it, and the call is settled."""
    path = f"/{behaviour}/{shape}/{key.subject}"
    with proxy.connect() as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key.secret}\r\n\r\n".encode())
        if behaviour == "pause":
            assert connection.recv(12) == b"HTTP/1.1 200"
        until(lambda: any(path in seen.line for seen in upstream.seen))
    assert upstream.last(path).left.wait(PATIENCE_S)
    expected = {"linger": (1, "cancelled"), "pause": (COST, "ok" if shape == "whole" else "cancelled")}
    assert settled(db, key) == [("settled", *expected[behaviour])]


@pytest.mark.parametrize(
    "framing", ["Content-Length: 100\r\n\r\nonly a part", "Transfer-Encoding: chunked\r\n\r\n6\r\na part\r\n"]
)
def test_a_client_that_leaves_in_the_middle_of_its_body(
    proxy: Proxy, upstream: Upstream, db: Connection, key: Key, framing: str
) -> None:
    path = f"/ok/{key.subject}"
    with proxy.connect() as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key.secret}\r\n{framing}".encode())
        until(lambda: any(path in seen.line for seen in upstream.seen))
    assert settled(db, key) == [("settled", 1, "cancelled")]
    assert not upstream.last(path).whole


def test_an_upstream_that_is_not_there(gateway_database: str, db: Connection, key: Key, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    running = start(tmp_path, CONFIG.format(upstream=f"http://127.0.0.1:{port}"), gateway_database)
    try:
        answer = running.request("GET", "/ok/whole", headers=key.headers)
        assert (answer.status, answer.problem) == (502, "bad_gateway")
        assert str(port) not in answer.body.decode()
        assert settled(db, key) == [("settled", 1, "error")]
        assert running.request("GET", "/-/health").status == 200
    finally:
        stop(running)


# -- both ways, as it comes -----------------------------------------------------------------------------------------


def test_pieces_pass_as_they_come(proxy: Proxy, upstream: Upstream, key: Key) -> None:
    """The first piece is there while the upstream still holds the rest back; the same on the way to it."""
    with proxy.connect() as connection:
        connection.sendall(
            f"POST /echo/stream/{key.subject} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key.secret}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        received = b""
        for piece in (b"first", b"second", b"third"):
            connection.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            while piece not in received:
                received += connection.recv(4096)
        connection.sendall(b"0\r\n\r\n")
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(4096)


def test_a_large_body_is_not_kept(proxy: Proxy, upstream: Upstream, key: Key) -> None:
    """64 MiB both ways, and the process grows by a fraction of it."""
    before = peak_kib(proxy)
    body = b"0123456789abcdef" * (4 << 20)
    answer = proxy.request("POST", f"/mirror/whole/{key.subject}", body, key.headers)
    assert hashlib.sha256(answer.body).digest() == hashlib.sha256(body).digest()
    assert peak_kib(proxy) - before < 24 << 10


def peak_kib(proxy: Proxy) -> int:
    """The most memory that a worker has had so far, in KiB."""
    workers = Path(f"/proc/{proxy.process.pid}/task/{proxy.process.pid}/children").read_text().split()
    status = "".join(Path(f"/proc/{worker}/status").read_text() for worker in workers)
    return max(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def test_methods_and_bodyless_answers(proxy: Proxy, db: Connection, key: Key) -> None:
    head = proxy.request("HEAD", "/ok/whole", headers=key.headers)
    assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", str(len(BODY)))
    assert proxy.request("DELETE", "/nothing/whole", headers=key.headers).status == 204
    assert settled(db, key) == [("settled", COST, "ok"), ("settled", 0, "ok")]


def test_bounds(proxy: Proxy, upstream: Upstream, db: Connection, key: Key) -> None:
    """Refused before anything is held or asked; what only the answer shows ends it."""
    for query, problem in (("ids=a,b,c", "too_many_targets"), ("from=2026-01-01&to=2026-01-31", "period_too_long")):
        answer = proxy.request("GET", f"/narrow/{key.subject}?{query}", headers=key.headers)
        assert (answer.status, answer.problem) == (422, problem)
    assert settled(db, key) == []
    assert not any(f"/narrow/{key.subject}" in seen.line for seen in upstream.seen)
    assert proxy.request("GET", "/narrow/whole?ids=a,b", headers=key.headers).status == 200
    for shape in ("whole", "stream"):
        answer = proxy.request("GET", f"/small/{shape}", headers=key.headers)
        assert (answer.status, answer.problem) == (502, "response_too_large")
    assert settled(db, key)[1:] == [("settled", COST, "error")] * 2


# -- who asks, and what they may say --------------------------------------------------------------------------------


def test_without_a_good_key_the_upstream_is_not_touched(
    proxy: Proxy, upstream: Upstream, gateway_database: str
) -> None:
    revoked = make_key(gateway_database)
    with connect(gateway_database) as db:
        db.execute("SELECT quota.revoke_key(%s, 'test')", (revoked.subject.removeprefix("key:"),))
    before = len(upstream.seen)
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Basic YTpi"}, 401),
        ({"Authorization": "Bearer nonsense"}, 401),
        ({"Authorization": "Bearer qk_none_" + "A" * 43}, 401),
        ({"X-Api-Key": ""}, 401),
        (revoked.headers, 401),
        ({"Authorization": f"Bearer {revoked.secret}", "X-Api-Key": revoked.secret}, 400),
    ):
        answer = proxy.request("GET", "/ok/whole", headers=headers)
        assert answer.status == status, headers
        assert answer.headers["Content-Type"] == "application/problem+json"
    assert len(upstream.seen) == before
    assert proxy.request("GET", "/free").status == 200  # a route that is not metered


def test_what_a_client_may_not_say(proxy: Proxy, upstream: Upstream, db: Connection, key: Key) -> None:
    """Identities, costs, where it comes from: the upstream hears them from the gateway alone."""
    path = f"/ok/{key.subject}"
    spoofed = {
        "X-Agent-Cost": "0", "x-agent-facts": "rows=0", "X-Quota-Subject": "key:admin", "X_Quota_Subject": "key:admin",
        "Quota-Tenant": "other", "X-Forwarded-For": "10.0.0.1", "X-Forwarded-User": "root", "Forwarded": "for=10.0.0.1",
        "X-Real-Ip": "10.0.0.1", "X-Original-Url": "/admin", "X-Http-Method-Override": "DELETE", "Remote-User": "root",
        "Proxy-Authorization": "Basic YTpi", "TE": "trailers", "Keep-Alive": "timeout=5", "Upgrade": "h2c",
        "Connection": "close, X-Quota-Subject, X-Private", "X-Private": "for one hop",
        "X-Harmless": "stays", "Accept": "text/csv", "User-Agent": "agent/1", "Accept-Encoding": "br",
    }  # fmt: skip
    assert proxy.request("GET", path, headers={**spoofed, **key.headers}).status == 200
    seen = upstream.last(path)
    assert seen.header("x-quota-subject") == [key.subject]
    assert seen.header("x-forwarded-for") == ["127.0.0.1"]
    assert seen.header("host") == [upstream.url.removeprefix("http://")]
    assert seen.header("x-forwarded-host") == [f"127.0.0.1:{proxy.port}"]
    assert seen.header("via") == ["1.1 quota"]
    kept = {"x-harmless": "stays", "accept": "text/csv", "user-agent": "agent/1", "accept-encoding": "br"}
    ours = {"host", "x-quota-subject", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "via"}
    assert {name for name, _ in seen.headers} == kept.keys() | ours
    assert all(seen.header(name) == [value] for name, value in kept.items())
    # The key itself is the gateway's business.
    assert not any(key.secret in value for _, value in seen.headers)
    # The cost is what the upstream has told, and that is not for the client.
    answer = proxy.request("GET", path, headers=key.headers)
    assert answer.headers["X-Agent-Cost"] is None
    assert answer.headers["RateLimit"] is not None
    assert settled(db, key) == [("settled", COST, "ok")] * 2


REQUEST = "{method} {target} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {secret}\r\n{more}\r\n"
SMUGGLING = {
    "length and coding": ("POST", "/ok/x", "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"),
    "two lengths": ("POST", "/ok/x", "Content-Length: 4\r\nContent-Length: 5\r\n", "aaaaa"),
    "the same length twice": ("POST", "/ok/x", "Content-Length: 4\r\nContent-Length: 4\r\n", "aaaa"),
    "a list of lengths": ("POST", "/ok/x", "Content-Length: 4, 4\r\n", "aaaa"),
    "a signed length": ("POST", "/ok/x", "Content-Length: +4\r\n", "aaaa"),
    "a length with a space": ("POST", "/ok/x", "Content-Length : 4\r\n", "aaaa"),
    "two codings": ("POST", "/ok/x", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", "0\r\n\r\n"),
    "coding xchunked": ("POST", "/ok/x", "Transfer-Encoding: xchunked\r\n", "0\r\n\r\n"),
    "coding identity": ("POST", "/ok/x", "Transfer-Encoding: identity\r\n", ""),
    "coding gzip, chunked": ("POST", "/ok/x", "Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n"),
    "coding in a second line": ("POST", "/ok/x", "Transfer-Encoding:\r\n chunked\r\n", "0\r\n\r\n"),
    "coding with a control character": ("POST", "/ok/x", "Transfer-Encoding: \x0bchunked\r\n", "0\r\n\r\n"),
    "a bare line feed": ("POST", "/ok/x", "X: a\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"),
    "a bare carriage return": ("GET", "/ok/x", "X: a\rY: b\r\n", ""),
    "a null": ("GET", "/ok/x", "X: a\0b\r\n", ""),
    "a folded value": ("GET", "/ok/x", "X: a\r\n b\r\n", ""),
    "two hosts": ("GET", "/ok/x", "Host: y\r\n", ""),
    "two keys": ("GET", "/ok/x", "X-Api-Key: other\r\n", ""),
    "no name": ("GET", "/ok/x", ": b\r\n", ""),
    "a name with a space": ("GET", "/ok/x", "X Y: b\r\n", ""),
    "bytes that are no text": ("GET", "/ok/x", "X: \udcff\r\n", ""),
    "a chunk of a strange size": ("POST", "/ok/x", "Transfer-Encoding: chunked\r\n", "0x4\r\naaaa\r\n0\r\n\r\n"),
    "dots": ("GET", "/ok/../narrow/x?ids=a,b,c", "", ""),
    "encoded dots": ("GET", "/ok/%2e%2e/narrow/x", "", ""),
    "an encoded slash": ("GET", "/ok%2fx", "", ""),
    "an empty segment": ("GET", "/ok//x", "", ""),
    "a backslash": ("GET", "/ok\\..\\x", "", ""),
    "an encoded backslash": ("GET", "/ok/%5c..%5cx", "", ""),
    "an encoded line": ("GET", "/ok/a%0d%0ab", "", ""),
    "a path that is not UTF-8": ("GET", "/ok/%ff", "", ""),
    "half an encoding": ("GET", "/ok/%f", "", ""),
    "a fragment": ("GET", "/ok/x#y", "", ""),
    "another host as the target": ("GET", "http://evil.example/ok/x", "", ""),
    "no path": ("GET", "ok/x", "", ""),
    "a star": ("OPTIONS", "*", "", ""),
    "CONNECT": ("CONNECT", "evil.example:443", "", ""),
    "TRACE": ("TRACE", "/ok/x", "", ""),
    "WebSocket without a handshake": ("POST", "/ok/x", "Upgrade: WebSocket\r\n", ""),
    "WebSocket": (
        "GET", "/ok/x", "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("attack", SMUGGLING.values(), ids=SMUGGLING.keys())
def test_smuggling(
    proxy: Proxy, upstream: Upstream, db: Connection, key: Key, attack: tuple[str, str, str, str]
) -> None:
    """What can be read in two ways is answered once, with a refusal; nothing of it, nor what follows, goes further."""
    method, target, more, body = attack
    marker = f"/ok/smuggled/{key.subject}"
    head = REQUEST.format(method=method, target=target, secret=key.secret, more=more)
    hidden = REQUEST.format(method="GET", target=marker, secret=key.secret, more="") if body else ""
    before = len(upstream.seen)
    answer = proxy.raw((head + body + hidden).encode("utf-8", "surrogateescape"))
    status = int(answer.split(b" ", 2)[1])
    assert status in (400, 405, 501), answer
    assert not any(marker in seen.line for seen in upstream.seen[before:])
    assert settled(db, key) == []


HANDSHAKES = {
    "in order": {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="},
    "of another version": {"Sec-WebSocket-Version": "8", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="},
    "without a key": {"Sec-WebSocket-Version": "13"},
}


@pytest.mark.parametrize("handshake", HANDSHAKES.values(), ids=HANDSHAKES.keys())
@pytest.mark.parametrize("path", ["/ok/whole", "/free"])
def test_a_websocket_is_refused_in_words(
    proxy: Proxy, upstream: Upstream, db: Connection, key: Key, path: str, handshake: dict[str, str]
) -> None:
    """Whatever the handshake looks like, and whoever asks: one answer, which says what to do, and nothing else."""
    before = len(upstream.seen)
    for who in (key.headers, {}):
        headers = {"Connection": "Upgrade", "Upgrade": "WebSocket", **handshake, **who}
        answer = proxy.request("GET", path, headers=headers)
        assert (answer.status, answer.problem) == (501, "no_websockets")
        assert "may stream" in answer.json["detail"]
        assert answer.headers["Cache-Control"] == "no-store"
    assert len(upstream.seen) == before
    assert settled(db, key) == []


async def test_a_client_of_websockets_learns_why(proxy: Proxy, upstream: Upstream, key: Key) -> None:
    before = len(upstream.seen)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(f"ws://127.0.0.1:{proxy.port}/ok/whole", headers=key.headers)
        # The session is good for the next request, by plain HTTP.
        async with session.get(f"http://127.0.0.1:{proxy.port}/ok/whole", headers=key.headers) as answer:
            assert answer.status == 200
    assert refused.value.status == 501
    assert refused.value.headers is not None
    assert refused.value.headers["Content-Type"] == "application/problem+json"
    assert len(upstream.seen) == before + 1


def test_keep_alive_and_pipelining(proxy: Proxy, db: Connection, key: Key) -> None:
    """Several requests on one connection, sent before the first is answered: answered in order, each settled once."""
    with proxy.connect() as connection:
        one = REQUEST.format(method="GET", target="/ok/whole", secret=key.secret, more="")
        two = (
            REQUEST.format(method="POST", target="/ok/stream", secret=key.secret, more="Content-Length: 3\r\n") + "abc"
        )
        bad = REQUEST.format(method="GET", target="/exception/whole", secret=key.secret, more="")
        last = REQUEST.format(method="GET", target="/ok/whole", secret=key.secret, more="Connection: close\r\n")
        connection.sendall((one + two + bad + last).encode())
        found = b""
        while piece := connection.recv(65536):
            found += piece
    assert [part.split(b" ", 1)[0] for part in found.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"500", b"200"]
    assert found.count(BODY) == 3
    assert sorted(settled(db, key)) == [("settled", 1, "error")] + [("settled", COST, "ok")] * 3


def test_the_cap_is_exact_under_64_clients(proxy: Proxy, gateway_database: str, db: Connection) -> None:
    """A bucket of 1,000 that never refills, holds of 50, 8 booked for each: what is granted never passes it."""
    key = make_key(gateway_database, bucket=1_000)
    begin = threading.Barrier(64)

    def ask(_: int) -> list[int]:
        begin.wait(PATIENCE_S)
        return [proxy.request("GET", "/ok/whole", headers=key.headers).status for _ in range(3)]

    with ThreadPoolExecutor(64) as pool:
        seen = Counter(status for answers in pool.map(ask, range(64)) for status in answers)
    assert set(seen) <= {200, 429}
    assert settled(db, key) == [("settled", COST, "ok")] * seen[200]
    # Alone it goes on to the very end: as long as a hold of 50 fits, and not once more.
    while proxy.request("GET", "/ok/whole", headers=key.headers).status == 200:
        seen[200] += 1
    assert seen[200] == (1_000 - 50) // COST + 1
    (level,) = db.execute("SELECT level FROM quota.balance(%s) WHERE limit_name = 'bucket'", (key.subject,)).fetchone()  # type: ignore[misc]
    assert level == 1_000 - COST * seen[200]


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_client_that_keeps_the_gateway_waiting(
    gateway_database: str, upstream: Upstream, db: Connection, key: Key, tmp_path: Path, method: str
) -> None:
    """One that announces a body and does not send it, one that asks for a large answer and does not read it."""
    config = 'client_timeout = "300ms"\n' + CONFIG.format(upstream=upstream.url)
    running = start(tmp_path, config, gateway_database)
    try:
        with running.connect() as connection:
            more = "Content-Length: 100\r\n" if method == "POST" else ""
            path = f"/large/{key.subject}"
            head = REQUEST.format(method=method, target=path, secret=key.secret, more=more)
            connection.sendall(head.encode() + b"a part" * (method == "POST"))
            if method == "POST":
                assert connection.recv(12) == b"HTTP/1.1 408"
                assert settled(db, key) == [("settled", 1, "cancelled")]
            else:
                until(lambda: any(path in seen.line for seen in upstream.seen))
                assert upstream.last(path).left.wait(PATIENCE_S)
                assert settled(db, key) == [("settled", COST, "ok")]  # with its head
    finally:
        stop(running)


# -- the process ----------------------------------------------------------------------------------------------------


def test_health(proxy: Proxy, gateway_database: str, upstream: Upstream, tmp_path: Path) -> None:
    assert proxy.request("GET", "/-/health/ready").status == 200
    assert proxy.request("POST", "/-/health", b"").status == 405
    away = start(
        tmp_path, CONFIG.format(upstream=upstream.url), "postgresql://nobody@127.0.0.1:1/none", QUOTA_TIMEOUT_S="1"
    )
    try:
        ready = away.request("GET", "/-/health/ready")
        assert (ready.status, ready.problem, ready.headers["Retry-After"]) == (503, "not_ready", "1")
        before = len(upstream.seen)
        closed = away.request("GET", "/ok/whole", headers={"Authorization": "Bearer qk_none_" + "A" * 43})
        assert (closed.status, closed.problem) == (503, "unavailable")
        assert len(upstream.seen) == before
    finally:
        stop(away)


FAILS_OPEN = """
upstream = "{upstream}"

[[routes]]
path = "/ok/<path:rest>"
estimate = {{ fixed = 50 }}
fail_open = {{ capacity = 100, refill_per_s = 0 }}

[[routes]]
path = "/<path:rest>"
"""


def test_known_keys_pass_while_the_ledger_is_away_up_to_the_ceiling(
    gateway_database: str, db: Connection, upstream: Upstream, key: Key, tmp_path: Path
) -> None:
    with DatabaseProxy(gateway_database) as between:
        config = FAILS_OPEN.format(upstream=upstream.url)
        running = start(tmp_path, config, between.url, QUOTA_WORKERS="1", QUOTA_TIMEOUT_S="2")
        try:
            until(lambda: running.request("GET", "/ok/whole", headers=key.headers).status == 200)
            before = settled(db, key)
            between.close()
            answers = [running.request("GET", "/ok/whole", headers=key.headers) for _ in range(3)]
            seen = len(upstream.seen)
            elsewhere = running.request("GET", "/exception/whole", headers=key.headers)
            stranger = running.request("GET", "/ok/whole", headers=make_key(gateway_database).headers)
        finally:
            stop(running)
    assert [answer.status for answer in answers] == [200, 200, 503]
    assert [answer.headers["Quota-Fail-Open"] for answer in answers] == ["?1", "?1", None]
    assert (elsewhere.status, stranger.status, len(upstream.seen)) == (503, 503, seen)
    assert settled(db, key) == before, "what has passed unchecked is in nobody's books"
    assert "fail_open" in running.log.read_text()


def test_a_graceful_stop_settles_what_is_in_flight(
    gateway_database: str, upstream: Upstream, db: Connection, key: Key, tmp_path: Path
) -> None:
    running = start(tmp_path, CONFIG.format(upstream=upstream.url), gateway_database)
    path = f"/gate/whole/{key.subject}"
    answers: list[int] = []
    caller = threading.Thread(target=lambda: answers.append(running.request("GET", path, headers=key.headers).status))
    caller.start()
    until(lambda: any(path in seen.line for seen in upstream.seen))
    running.process.terminate()
    # It no longer takes anybody new, while the call goes on.
    until(lambda: "shutting down" in running.log.read_text().lower() or "term" in running.log.read_text().lower())
    assert running.process.poll() is None
    upstream.gate.set()
    caller.join(PATIENCE_S)
    assert answers == [200]
    assert running.process.wait(PATIENCE_S) == 0
    assert settled(db, key) == [("settled", COST, "ok")]
