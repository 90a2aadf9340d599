"""limits_of: the balance with its terms, whatever kind of limit it is."""

from __future__ import annotations

from decimal import Decimal

from tests.server import Connection
from tests.sql.kit import NOON, advance, bucket, budget, call, hold, misuse, rows, set_clock, slots


def test_terms_and_standing_agree_with_balance(tx_conn: Connection) -> None:
    set_clock(tx_conn, NOON)
    call(tx_conn, "create_subject", "org:a")
    call(tx_conn, "create_subject", "key:k", parent="org:a", rate_tier="extended")
    bucket(tx_conn, "key:k", 10, Decimal("0.5"), name="own")
    budget(tx_conn, "org:a", 50, name="life")
    budget(tx_conn, "org:a", 50, name="day", period="day")
    budget(tx_conn, "org:a", 50, name="month", period="month")
    budget(tx_conn, "org:a", None, name="all", unit="tokens")
    slots(tx_conn, "key:k", 3)
    hold(tx_conn, "key:k", {"cost": 3, "usd": 7, "tokens": 1})
    advance(tx_conn, "2 seconds")
    known = rows(tx_conn, "balance", "key:k")
    found = rows(tx_conn, "limits_of", "key:k")
    shared = [name for name in known[0] if name != "subject"]
    assert [{name: row[name] for name in shared} | {"subject": row["owner"]} for row in found] == known
    terms = {
        row["limit_name"]: (row["money"], row["refill_per_s"], row["period"], row["window_s"], row["resets_in_s"])
        for row in found
    }
    half_a_day = 12 * 3600 - 2
    assert terms == {
        "bucket": (False, 15_000, None, None, None),
        "hourly": (False, None, "01:00:00", 3600, 3598),
        "own": (False, Decimal("0.5"), None, None, None),
        "slots": (False, None, None, None, None),
        "all": (False, None, None, None, None),
        "day": (True, None, "day", 86_400, half_a_day),
        "life": (True, None, None, None, None),
        "month": (True, None, "month", 31 * 86_400, half_a_day + 27 * 86_400),
    }


def test_no_window_is_open_before_the_first_use(tx_conn: Connection) -> None:
    call(tx_conn, "create_subject", "key:k")
    found = {row["limit_name"]: row for row in rows(tx_conn, "limits_of", "key:k")}
    assert (found["hourly"]["window_s"], found["hourly"]["resets_in_s"]) == (3600, None)
    assert (found["bucket"]["full_after_s"], found["bucket"]["available"]) == (0, 1_000_000)


def test_a_subject_that_nobody_knows(tx_conn: Connection) -> None:
    with misuse(tx_conn, "unknown_subject", "key:none"):
        call(tx_conn, "limits_of", "key:none")
