"""The environment, read once: defaults, every rule, and no password in any text."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quota.config import ConfigError, Settings, default_data_dir, redact_url


def settings(**environ: str) -> Settings:
    return Settings.from_env({"HOME": "/home/me", **environ})


def test_defaults() -> None:
    got = settings()
    assert got.database_url is None
    assert got.tenant == "default"
    assert got.timeout_s == Decimal(2)
    assert got.pool_max == 8
    assert got.prepare_threshold == 5
    assert got.fail_open is False
    assert got.data_dir.is_absolute()


def test_everything_set() -> None:
    got = settings(
        QUOTA_DATABASE_URL="postgresql://u:p@db1,db2:5433/q?sslmode=require",
        QUOTA_DATA_DIR="/srv/quota",
        QUOTA_TENANT="Ünïted:acme 1",
        QUOTA_TIMEOUT_S="0.25",
        QUOTA_POOL_MAX="20",
        QUOTA_PREPARE_THRESHOLD="none",
        QUOTA_FAIL_OPEN="Yes",
    )
    assert got == Settings(
        database_url="postgresql://u:p@db1,db2:5433/q?sslmode=require",
        data_dir=Path("/srv/quota"),
        tenant="Ünïted:acme 1",
        timeout_s=Decimal("0.25"),
        pool_max=20,
        prepare_threshold=None,
        fail_open=True,
    )


def test_empty_counts_as_not_set() -> None:
    names = ("DATABASE_URL", "DATA_DIR", "TENANT", "TIMEOUT_S", "POOL_MAX", "PREPARE_THRESHOLD", "FAIL_OPEN")
    assert settings(**{f"QUOTA_{name}": "" for name in names}) == settings()


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        settings().pool_max = 9  # type: ignore[misc]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://quota@/quota?host=/tmp/x&port=5432",
        "postgres://[::1]:5432/q",
        "host=/tmp dbname=quota",
        "dbname='a b'",
    ],
)
def test_database_url_taken(url: str) -> None:
    assert settings(QUOTA_DATABASE_URL=url).database_url == url


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DATABASE_URL", "mysql://u:hunter2@h/d"),
        ("DATABASE_URL", "postgresql+psycopg://u:hunter2@h/d"),
        ("DATABASE_URL", "postgresql://u:hunter2@h:99999/d"),
        ("DATABASE_URL", "postgresql://u:hunter2@h:port/d"),
        ("DATABASE_URL", "postgresql://u:hunter2@[::1/d"),
        ("DATABASE_URL", "just words"),
        ("DATABASE_URL", "u:hunter2@h/d"),
        ("DATA_DIR", "relative/path"),
        ("TENANT", " padded"),
        ("TENANT", "new\nline"),
        ("TENANT", "e\u0301"),
        ("TENANT", "zero\u200bwidth"),
        ("TENANT", "x" * 201),
        ("TIMEOUT_S", "0"),
        ("TIMEOUT_S", "-1"),
        ("TIMEOUT_S", "NaN"),
        ("TIMEOUT_S", "Infinity"),
        ("TIMEOUT_S", "soon"),
        ("TIMEOUT_S", "3601"),
        ("POOL_MAX", "0"),
        ("POOL_MAX", "1001"),
        ("POOL_MAX", "1_0"),
        ("POOL_MAX", "8.0"),
        ("POOL_MAX", "٣"),
        ("PREPARE_THRESHOLD", "-1"),
        ("PREPARE_THRESHOLD", "never"),
        ("FAIL_OPEN", "maybe"),
    ],
)
def test_refused_by_name_with_a_remedy(variable: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(**{f"QUOTA_{variable}": value})
    message = str(caught.value)
    assert message.startswith(f"QUOTA_{variable}: ")
    assert "; " in message
    assert "hunter2" not in message
    assert "\n" not in message
    assert caught.value.__cause__ is None, "the cause would be shown too, and may quote the value"


@pytest.mark.parametrize(
    ("url", "redacted"),
    [
        ("postgresql://u:p@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u@h/d", "postgresql://u@h/d"),
        ("postgresql://h/d", "postgresql://h/d"),
        ("postgresql://u:p@ss@h/d", "postgresql://u:***@h/d"),
        ("postgresql://me@corp:p@h/d", "postgresql://me@corp:***@h/d"),
        ("u:p@h/d", "u:***@h/d"),
        ("host=h:1 user=a@b", "host=h:1 user=a@b"),
        ("postgresql:///d?password=p&user=u", "postgresql:///d?password=***&user=u"),
        ("host=h password=p dbname=d", "host=h password=*** dbname=d"),
        ("host=h password='p q' dbname=d", "host=h password=*** dbname=d"),
        (r"host=h password='p\' q' dbname=d", "host=h password=*** dbname=d"),
        ("password = p", "password = ***"),
    ],
)
def test_redact_url(url: str, redacted: str) -> None:
    assert redact_url(url) == redacted


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_no_password_survives_in_a_url(password: str) -> None:
    """Also unescaped, where it breaks the URL."""
    secret = f"5ecret{password}5ecret"
    shown = redact_url(f"postgresql://user:{secret}@host/db")
    assert "5ecret" not in shown
    assert shown.startswith("postgresql://")


def test_repr_hides_the_password() -> None:
    text = repr(settings(QUOTA_DATABASE_URL="postgresql://u:hunter2@h/d"))
    assert "hunter2" not in text
    assert "postgresql://u:***@h/d" in text


def test_data_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_data_dir({"XDG_DATA_HOME": "/x", "HOME": "/home/me"}) == Path("/x/quota-ledger")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert default_data_dir({"HOME": "/home/me"}) == Path("/home/me/.local/share/quota-ledger")
    assert default_data_dir({"HOME": "/home/me", "XDG_DATA_HOME": "relative"}).parts[1:3] == ("home", "me")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert default_data_dir({"HOME": "/root"}) == Path("/var/lib/quota-ledger")
