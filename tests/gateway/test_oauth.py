"""Access tokens: what is good, and every way in which one is not."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from quota.client.attempts import Join
from quota.errors import Unavailable
from quota.gateway import jwks, oauth
from quota.gateway.jwks import KeySet, KeySetError, read_keys
from quota.gateway.oauth import Tokens
from quota.http.problems import Problem
from quota.metering import Identity

ISSUER, AUDIENCE = "https://id.example", "query-api"
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()


def public(key: Any, kid: str | None, **more: str) -> dict[str, Any]:
    """The JWK of a key's public half."""
    algorithm: Any = jwt.algorithms.RSAAlgorithm
    if isinstance(key, ec.EllipticCurvePrivateKey):
        algorithm = jwt.algorithms.ECAlgorithm
    elif isinstance(key, ed25519.Ed25519PrivateKey):
        algorithm = jwt.algorithms.OKPAlgorithm
    found: dict[str, Any] = json.loads(algorithm.to_jwk(key.public_key()))
    found.pop("key_ops", None)
    return found | ({} if kid is None else {"kid": kid}) | more


KEYS = [public(RSA_KEY, "rsa-1"), public(EC_KEY, "ec-1"), public(ED_KEY, "ed-1")]


def claims(**more: Any) -> dict[str, Any]:
    now = int(time.time())
    # Some are made when the tests are collected: a day, so that a slow run refuses them for what is wrong with them.
    found = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "exp": now + 86_400,
        "iat": now,
        "sub": "ann",
        "sid": "connection-a",
        **more,
    }
    return {name: value for name, value in found.items() if value is not None}


def token(key: Any = RSA_KEY, algorithm: str = "RS256", kid: str | None = "rsa-1", **more: Any) -> str:
    return jwt.encode(claims(**more), key, algorithm, headers={} if kid is None else {"kid": kid})


def b64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def forged(header: dict[str, Any], signature: Callable[[bytes], bytes] = lambda _: b"", **more: Any) -> str:
    """A token written by hand: a header that no library would write, and any signature."""
    text = f"{b64(json.dumps(header).encode())}.{b64(json.dumps(claims(**more)).encode())}"
    return f"{text}.{b64(signature(text.encode()))}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The issuer's keys in a file."""
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": KEYS}))
    return path


def verify(tokens: Tokens, presented: str) -> Identity:
    """Has a token's plan carried out, as a client does it."""
    plan = tokens.named(presented)
    try:
        step = next(plan)
        while True:
            assert isinstance(step, Join)
            futures.wait([step.other], timeout=60)
            step = plan.send(None)
    except StopIteration as stop:
        identity: Identity = stop.value
        return identity


def refused(tokens: Tokens, presented: str) -> int:
    with pytest.raises(Problem) as caught:
        verify(tokens, presented)
    return caught.value.status


def tokens(file: Path, **more: Any) -> Tokens:
    settings: dict[str, Any] = {"algorithms": ("RS256", "ES256", "EdDSA"), **more}
    return Tokens(KeySet(file), issuer=ISSUER, audience=AUDIENCE, **settings)


@pytest.mark.parametrize(
    "good",
    [
        token, lambda: token(EC_KEY, "ES256", "ec-1"), lambda: token(ED_KEY, "EdDSA", "ed-1"),
        lambda: token(aud=["other", AUDIENCE]),
        # Within the leeway, as clocks differ. Made when the test runs: a suite takes its time.
        lambda: token(exp=int(time.time()) - 5), lambda: token(nbf=int(time.time()) + 5),
    ],
    ids=["rsa", "ec", "ed", "audiences", "just expired", "not yet"],
)  # fmt: skip
def test_good_tokens(file: Path, good: Callable[[], str]) -> None:
    assert verify(tokens(file), good()).subject == "oauth:connection-a"


def test_a_refreshed_token_is_the_same_connection(file: Path) -> None:
    known = tokens(file, user_claim="sub")
    first, second = (verify(known, token(jti=jti)) for jti in "12")
    assert first.subject == second.subject == "oauth:connection-a"
    assert verify(known, token(sid="connection-b")).subject == "oauth:connection-b"
    assert first.parent == "user:ann"


def with_rsa_as_secret(text: bytes) -> bytes:
    """The attack of the public key as a shared secret."""
    pem = RSA_KEY.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hmac.new(pem, text, hashlib.sha256).digest()


ATTACKS = {
    "expired": token(exp=int(time.time()) - 60),
    "no expiry": token(exp=None),
    "not yet": token(nbf=int(time.time()) + 86_400),
    "issued in the future": token(iat=int(time.time()) + 86_400),
    "wrong issuer": token(iss="https://evil.example"),
    "issuer with a slash more": token(iss=ISSUER + "/"),
    "no issuer": token(iss=None),
    "wrong audience": token(aud="other"),
    "no audience": token(aud=None),
    "no connection": token(sid=None),
    "empty connection": token(sid=""),
    "connection that is no text": token(sid=7),
    "connection with a line": token(sid="a\nb"),
    "connection with an invisible character": token(sid="a\u200bb"),
    "connection in another normal form": token(sid="e\u0301"),
    "connection with a space at its end": token(sid="a "),
    "connection that is too long": token(sid="a" * 195),
    "signed by another key": token(OTHER_KEY),
    "signed by another key with its own id": token(OTHER_KEY, kid="rsa-2"),
    "no key id among several": token(kid=None),
    "key of another kind": token(EC_KEY, "ES256", "rsa-1"),
    "algorithm not configured": token(algorithm="RS512"),
    "algorithm of the same key, not configured": token(algorithm="PS256"),
    "none": forged({"alg": "none", "kid": "rsa-1"}),
    "None": forged({"alg": "None", "kid": "rsa-1"}),
    "nOnE": forged({"alg": "nOnE", "kid": "rsa-1"}),
    "no algorithm": forged({"kid": "rsa-1"}),
    "the public key as a secret": forged({"alg": "HS256", "kid": "rsa-1"}, with_rsa_as_secret),
    "an empty secret": forged({"alg": "HS256"}, lambda text: hmac.new(b"", text, hashlib.sha256).digest()),
    "an algorithm that is a list": forged({"alg": ["RS256"], "kid": "rsa-1"}),
    "a key id that is a number": forged({"alg": "RS256", "kid": 1}),
    "its own key": jwt.encode(
        claims(), OTHER_KEY, "RS256", headers={"kid": "rsa-1", "jwk": public(OTHER_KEY, "rsa-1")}
    ),
    "where its key is": jwt.encode(
        claims(), OTHER_KEY, "RS256", headers={"kid": "evil", "jku": "https://evil.example/keys"}
    ),
    "a path as its key": jwt.encode(claims(), OTHER_KEY, "RS256", headers={"kid": "../../dev/null"}),
    "extensions": jwt.encode(claims(), RSA_KEY, "RS256", headers={"kid": "rsa-1", "crit": ["exp"], "exp": 1}),
    "no signature": token().rpartition(".")[0] + ".",
    "a signature cut short": token()[:-20],
    "claims changed": ".".join([token().split(".")[0], token(sid="connection-b").split(".")[1], token().split(".")[2]]),
    "two parts": token().rpartition(".")[0],
    "five parts": "a.b.c.d.e",
    "no token": "hello",
    "nothing": "",
    "bytes that are no text": "\udcff.\udcff.\udcff",
    "too long": "a" * 9000,
    "deep": forged({"alg": "RS256", "kid": "rsa-1", "x": json.loads("[" * 400 + "]" * 400)}),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_attacks(file: Path, attack: str) -> None:
    with pytest.raises(Problem) as caught:
        verify(tokens(file), attack)
    # What is said goes into an answer and a log; nothing of the token does.
    assert caught.value.status == 401
    assert 'error="invalid_token"' in caught.value.headers["WWW-Authenticate"]
    assert not any(part in caught.value.detail for part in attack.split(".") if len(part) > 10)


def test_times_that_are_no_times(file: Path) -> None:
    values: tuple[object, ...] = ("soon", [], {}, 1e400, -1, True)
    for value in values:
        written = jwt.api_jws.encode(
            json.dumps(claims() | {"exp": value}).encode(), RSA_KEY, "RS256", headers={"kid": "rsa-1"}
        )
        with pytest.raises(Problem):
            verify(tokens(file), written)


def test_a_remembered_token_still_ends(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, end = tokens(file), int(time.time()) + 600
    presented = token(exp=end)
    verify(known, presented)
    monkeypatch.setattr(oauth, "time", SimpleNamespace(time=lambda: end + 11.0))
    with pytest.raises(Problem):
        verify(known, presented)


# -- the issuer's keys ----------------------------------------------------------------------------------------------


def test_keys_are_rotated(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new key is found as soon as a token names it; one that was withdrawn is good for nobody any more."""
    now = 1000.0
    monkeypatch.setattr(jwks, "time", SimpleNamespace(monotonic=lambda: now))
    known, new = tokens(file), token(OTHER_KEY, kid="rsa-2")
    old = token()
    verify(known, old)
    file.write_text(json.dumps({"keys": [public(OTHER_KEY, "rsa-2")]}))
    with pytest.raises(Problem):
        verify(known, new)  # asked a moment ago
    now += jwks.COOLDOWN_S
    assert verify(known, new).subject == "oauth:connection-a"
    with pytest.raises(Problem):
        verify(known, old)


def test_made_up_key_ids_ask_nobody(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    read = KeySet._text

    def counted(keys: KeySet) -> bytes:
        asked.append(read(keys))
        return asked[-1]

    monkeypatch.setattr(KeySet, "_text", counted)
    known = tokens(file)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: refused(known, token(kid=f"made-up-{n}")), range(50)))
    assert set(answers) == {401}
    assert len(asked) == 1


def test_an_issuer_that_is_away(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(jwks, "time", SimpleNamespace(monotonic=lambda: now))
    known, good = tokens(file), token()
    verify(known, good)
    file.unlink()
    now += jwks.REFRESH_S
    verify(known, good)  # the keys before
    now += jwks.STALE_S
    with pytest.raises(Unavailable):
        verify(known, good)


def test_an_issuer_that_was_never_there(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        verify(tokens(tmp_path / "none.json"), token())


SMALL_KEY = rsa.generate_private_key(public_exponent=65537, key_size=1024)
SECRET = {"kty": "oct", "k": b64(b"0" * 32), "kid": "secret"}


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("", "no JSON object"),
        ("[]", "no JSON object"),
        ('{"keys": {}}', "no list"),
        (json.dumps({"keys": []}), "no key for signatures"),
        (json.dumps({"keys": [SECRET]}), "no key for signatures"),
        (json.dumps({"keys": [public(SMALL_KEY, "small")]}), "no key for signatures"),
        (json.dumps({"keys": [public(RSA_KEY, "a", use="enc")]}), "no key for signatures"),
        (json.dumps({"keys": [public(RSA_KEY, "a", alg="HS256")]}), "no key for signatures"),
        (json.dumps({"keys": [public(RSA_KEY, "a"), public(EC_KEY, "a")]}), 'the key id "a" stands twice'),
        (json.dumps({"keys": [{"kty": "RSA", "kid": "a"}]}), "a key cannot be read"),
        (json.dumps({"keys": [{"kty": "OKP", "kid": str(n)} for n in range(101)]}), "no list of at most 100"),
        (json.dumps({"keys": ["RSA", None, 7]}), "no key for signatures"),
    ],
)
def test_key_sets_that_cannot_be_used(document: str, complaint: str) -> None:
    with pytest.raises(KeySetError, match=complaint):
        read_keys(document)


def test_a_key_is_good_for_its_own_algorithms_only() -> None:
    found = read_keys(json.dumps({"keys": [*KEYS, public(OTHER_KEY, "pinned", alg="RS512"), SECRET]}))
    assert set(found["rsa-1"]) == {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}
    assert (set(found["ec-1"]), set(found["ed-1"]), set(found["pinned"])) == ({"ES256"}, {"EdDSA"}, {"RS512"})
    assert "secret" not in found


def test_a_single_key_needs_no_id(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"keys": [public(RSA_KEY, None)]}))
    assert verify(tokens(path), token(kid=None)).subject == "oauth:connection-a"


@pytest.fixture
def issuer() -> Iterator[tuple[str, dict[str, tuple[int, bytes]]]]:
    """An issuer's web server: its address, and what it answers by path."""
    answers: dict[str, tuple[int, bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, b""))
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/keys")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Silence."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", answers
        server.shutdown()


@pytest.mark.parametrize(
    ("path", "good"), [("/keys", True), ("/elsewhere", False), ("/none", False), ("/large", False), ("/html", False)]
)
def test_keys_from_an_address(issuer: tuple[str, dict[str, tuple[int, bytes]]], path: str, good: bool) -> None:
    """Taken from where the configuration says, in bounded size; a redirect leads nowhere."""
    address, answers = issuer
    keys = json.dumps({"keys": KEYS}).encode()
    answers |= {
        "/keys": (200, keys), "/elsewhere": (302, b""), "/html": (200, b"<html>"),
        "/large": (200, keys + b" " * 300_000),
    }  # fmt: skip
    known = Tokens(KeySet(address + path), issuer=ISSUER, audience=AUDIENCE)
    if good:
        assert verify(known, token()).subject == "oauth:connection-a"
    else:
        with pytest.raises(Unavailable):
            verify(known, token())
