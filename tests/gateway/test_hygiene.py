"""What is refused and what is dropped, whatever the server in front has let through."""

from __future__ import annotations

from typing import Any

import pytest

from quota.gateway.hygiene import cleaned, fault_of, passed_back


def scope(
    *headers: tuple[str, str], path: str = "/a", query: str = "", method: str = "GET", version: str = "1.1"
) -> Any:
    host = [] if any(name == "host" for name, _ in headers) else [(b"host", b"x")]
    return {
        "method": method, "raw_path": path.encode("latin-1"), "query_string": query.encode("latin-1"),
        "http_version": version, "headers": host + [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers],
    }  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [
        scope(),
        scope(("host", "[::1]:8080")),
        scope(("content-length", "0"), method="POST"),
        scope(("transfer-encoding", "Chunked"), method="POST"),
        scope(("x", "caf\u00c3\u00a9")),  # UTF-8
        scope(("x", "a\tb")),
        scope(path="/a/b.c/..d/%C3%A9"),
        scope(path="/a/"),
        scope(query="a=b&ids[]=1,2&x=%zz&y=%2F..%2f"),
        scope(("accept", "a"), ("accept", "b")),
    ],
)
def test_in_order(asked: Any) -> None:
    assert fault_of(asked) is None


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (scope(("host", "a"), ("host", "b")), 400),
        (scope(("host", "a b")), 400),
        (scope(("host", "a/b")), 400),
        (scope(("host", "user@b")), 400),
        (scope(("host", "")), 400),
        (scope(("content-length", "1"), ("content-length", "1")), 400),
        (scope(("content-length", "1"), ("transfer-encoding", "chunked")), 400),
        (scope(("content-length", "-1")), 400),
        (scope(("content-length", "1" * 19)), 400),
        (scope(("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")), 400),
        (scope(("transfer-encoding", "gzip, chunked")), 400),
        (scope(("transfer-encoding", "chunked"), version="1.0"), 400),
        (scope(("authorization", "a"), ("authorization", "a")), 400),
        (scope(("x-api-key", "a"), ("x-api-key", "b")), 400),
        (scope(("x", "a\r\n b")), 400),
        (scope(("x", "a\nb")), 400),
        (scope(("x", "a\0")), 400),
        (scope(("x", "a\x7f")), 400),
        (scope(("x", "\xff")), 400),
        (scope(path="a"), 400),
        (scope(path="*"), 400),
        (scope(path="http://b/a"), 400),
        (scope(path="/a b"), 400),
        (scope(path="/\xe9"), 400),
        (scope(path="/a/."), 400),
        (scope(path="/a/%2E%2e/b"), 400),
        (scope(path="//a"), 400),
        (scope(path="/a%2Fb"), 400),
        (scope(path="/a%5Cb"), 400),
        (scope(path="/a%00"), 400),
        (scope(path="/a%C2%85"), 400),
        (scope(path="/%ff"), 400),
        (scope(path="/%4"), 400),
        (scope(query="a b"), 400),
        (scope(query="a#b"), 400),
        (scope(query="\xe9"), 400),
        (scope(method="CONNECT"), 405),
        (scope(method="TRACE"), 405),
        (scope(("upgrade", "h2c, WebSocket")), 501),
    ],
)
def test_refused(asked: Any, status: int) -> None:
    problem = fault_of(asked)
    assert problem is not None
    assert problem.status == status


def test_no_host() -> None:
    without = scope() | {"headers": []}
    assert fault_of(without) is not None
    assert fault_of(without | {"http_version": "1.0"}) is None


def test_what_no_client_says() -> None:
    given = [
        (b"accept", b"1"), (b"x_quota_subject", b"2"), (b"x-quota-subject", b"3"), (b"quota-tenant", b"4"),
        (b"x-agent-cost", b"5"), (b"x-forwarded-anything", b"6"), (b"te", b"7"), (b"x-mine", b"8"),
        (b"connection", b"keep-alive, X-Hop"), (b"x-hop", b"9"), (b"content-length", b"3"),
    ]  # fmt: skip
    assert cleaned(given, {b"x-mine"}) == [(b"accept", b"1"), (b"content-length", b"3")]
    # What the body is framed with is not to be taken away by naming it.
    named = [(b"connection", b"content-length"), (b"content-length", b"3")]
    assert cleaned(named) == [(b"content-length", b"3")]


def test_what_an_answer_passes_on() -> None:
    given = [
        (b"Content-Type", b"a"), (b"Transfer-Encoding", b"chunked"), (b"Connection", b"X-Hop, X-Agent-Cost"),
        (b"X-Hop", b"b"), (b"X-Agent-Cost", b"5"), (b"Set-Cookie", b"c"), (b"Set-Cookie", b"d"),
    ]  # fmt: skip
    assert passed_back(given) == [
        (b"content-type", b"a"), (b"x-agent-cost", b"5"), (b"set-cookie", b"c"), (b"set-cookie", b"d"),
    ]  # fmt: skip
