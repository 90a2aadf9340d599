"""The life of a reservation from a shell, what admins do, and what is shown of it."""

from __future__ import annotations

import os
from uuid import UUID

import psycopg
import pytest

from quota.client import Client
from quota.lease import LeasedBudget
from tests.cli.conftest import Quota, run_quota
from tests.server import connect, with_database

ID = "01890a5d-ac96-774b-bcce-b302099a8057"


def test_a_reservation_from_a_shell(team: Quota, shell: Quota) -> None:
    reserved = shell("reserve", "key:42", "usd=0.25", "--quiet")
    assert reserved.code == 0
    identity = reserved.out.strip()
    assert UUID(identity).version == 7

    (hold,) = team("holds", "--json").rows
    assert (hold["reservation"], hold["held"], hold["overdue"]) == (identity, {"usd": "0.25"}, False)

    settled = shell("settle", identity, "usd=0.31", "--json")
    assert settled.code == 0
    assert settled.document == {
        "reservation": identity, "state": "settled", "late": False, "replayed": False, "overage": {"usd": "0.06"},
    }  # fmt: skip

    rows = team("ledger", "key:42", "--json").rows
    assert [(row["kind"], row["subject"], row["amount"]) for row in rows] == [
        ("settle", "team:a", "0.25"),
        ("overage", "team:a", "0.06"),
    ]
    assert [row["entry"] for row in team("ledger", "--reservation", identity, "--json").rows] == [
        row["entry"] for row in rows
    ]
    text = shell("balance", "team:a").out.splitlines()
    assert text[0].split()[:3] == ["subject", "limit", "unit"]
    assert text[1].split()[:7] == ["team:a", "lifetime", "usd", "budget", "50", "0.31", "0"]
    assert "\x1b" not in "".join(text)


def test_amounts_stay_exact(team: Quota) -> None:
    granted = team("reserve", "key:42", "usd=49.999999999999", "--json").document
    assert granted["granted"] is True
    assert granted["reserved"] == "49.999999999999"
    (row,) = team("balance", "team:a", "--json").rows
    assert (row["reserved"], row["available"]) == ("49.999999999999", "0.000000000001")


def test_a_refusal_is_exit_code_1_and_says_why(team: Quota) -> None:
    refused = team("reserve", "key:42", "usd=60")
    assert refused.code == 1
    assert refused.out == ""
    assert refused.complaint == (
        'quota: refused, too_large by limit "lifetime" of team:a: capacity 50 usd, spent 0, reserved 0, requested 60'
    )
    document = team("reserve", "key:42", "usd=60", "--json").document
    assert (document["granted"], document["reason"], document["limit_name"]) == (False, "too_large", "lifetime")
    # The script that asks for the id alone gets nothing it could take for one.
    assert team("reserve", "key:42", "usd=60", "--quiet").out == ""


def test_the_same_id_is_the_same_reservation(team: Quota) -> None:
    first = team("reserve", "key:42", "usd=1", "--id", ID)
    again = team("reserve", "key:42", "usd=1", "--id", ID)
    assert (first.code, again.code) == (0, 0)
    assert first.out.startswith(f"granted {ID} until ")
    assert again.out.splitlines()[0].endswith(", as before")
    other = team("reserve", "key:42", "usd=2", "--id", ID)
    assert other.code == 2
    assert "id_conflict" in other.complaint
    assert team("release", ID).out == f"released {ID}\n"
    assert team("release", ID, "--json").document["replayed"] is True


def test_partial_and_unknown_settles(team: Quota) -> None:
    identity = team("reserve", "key:42", "usd=10", "--quiet", "--details", '{"job": "7"}').out.strip()
    assert team("settle", identity, "usd=3", "--partial").out.startswith("held ")
    (hold,) = team("holds", "key:42", "--json").rows
    assert (hold["booked"], hold["details"]) == ({"usd": "3"}, {"job": "7"})
    assert team("settle", identity, "--outcome", "unknown").code == 0
    (row,) = team("balance", "team:a", "--json").rows
    assert (row["spent"], row["reserved"]) == ("10", "0")


def test_subjects(team: Quota) -> None:
    assert [row["name"] for row in team("subject", "list", "--json").rows] == ["key:42", "team:a"]
    assert [row["name"] for row in team("subject", "list", "--kind", "team", "--json").rows] == ["team:a"]
    shown = team("subject", "show", "key:42", "--json").document
    assert (shown["lineage"], shown["rate_tier"], len(shown["balance"])) == (["key:42", "team:a"], "basic", 3)

    assert team("subject", "create", "key:42", "--parent", "team:a", "--if-missing").out == (
        "subject key:42 is there already\n"
    )
    assert team("subject", "freeze", "team:a", "--reason", "runaway").code == 0
    refused = team("reserve", "key:42", "usd=1")
    assert (refused.code, refused.complaint) == (1, "quota: refused, frozen (team:a)")
    assert "frozen: runaway" in team("subject", "list").out
    assert team("subject", "unfreeze", "team:a").code == 0
    assert team("subject", "move", "key:42", "--to-root").code == 0
    assert team("subject", "retire", "key:42").code == 0
    assert [row["name"] for row in team("subject", "list", "--json").rows] == ["team:a"]
    assert "key:42: retired" in team("subject", "show", "key:42").out


def test_limits_and_tiers(team: Quota) -> None:
    assert team("limit", "set", "user:*", "at-once", "--unit", "concurrency", "--kind", "concurrency",
                "--capacity", "5").code == 0  # fmt: skip
    assert team("limit", "set", "team:a", "lifetime", "--unit", "usd", "--capacity", "unlimited").code == 0
    rows = {(row["owner"], row["name"]): row["capacity"] for row in team("limit", "list", "--json").rows}
    assert rows == {("team:a", "lifetime"): None, ("user:*", "at-once"): "5"}
    assert "unlimited" in team("limit", "list", "team:a").out
    assert team("limit", "remove", "team:a", "lifetime").code == 0
    assert "no limits" in team("limit", "list", "team:a").out

    # The tenant's own tier, unless --builtin says otherwise.
    assert team("tier", "limit", "gold", "bucket", "--unit", "cost", "--kind", "bucket", "--capacity", "2000000",
                "--refill-per-s", "6000").code == 0  # fmt: skip
    assert [row["tenant"] for row in team("tier", "list", "--json").rows if row["tier"] == "gold"] == ["default"]
    assert team("tier", "set", "key:42", "gold").code == 0
    (bucket,) = [row for row in team("balance", "key:42", "--json").rows if row["limit_name"] == "bucket"]
    assert bucket["capacity"] == "2000000"
    assert team("tier", "retire", "gold").code == 0
    assert "gold (retired)" in team("tier", "list").out


def test_tenants_and_units(quota: Quota) -> None:
    assert quota("tenant", "create", "acme").code == 0
    assert quota("unit", "create", "eur", "--money").out == "unit eur created, money\n"
    assert quota("subject", "create", "team:a", "--tenant", "acme").code == 0
    assert quota("subject", "list").out.startswith("no subjects")
    assert "team:a" in quota("subject", "list", QUOTA_TENANT="acme").out


def test_check_and_repair(database: str, team: Quota) -> None:
    assert (team("check").code, team("check").out) == (0, "the books are right\n")
    team("reserve", "key:42", "usd=1")
    with connect(database) as connection:
        connection.execute("UPDATE quota_internal.accounts SET reserved = 7 WHERE unit = 'usd'")
    found = team("check", "--json")
    assert (found.code, found.document["ok"]) == (1, False)
    assert found.document["violations"][0]["invariant"] == "reserved_matches_holds"
    (repaired,) = team("repair", "--json").document["repaired"]
    assert (repaired["counter"], repaired["was"], repaired["is_now"]) == ("reserved", "7", "1")
    assert team("check", "--json").document == {"ok": True, "violations": []}


@pytest.mark.parametrize(
    ("role", "allowed", "refused"),
    [
        ("quota_reaper", ("reap",), ("reserve", "key:42", "usd=1")),
        ("quota_worker", ("balance", "key:42"), ("limit", "set", "team:a", "x", "--unit", "usd", "--capacity", "1")),
    ],
)
def test_a_login_does_what_its_role_may(
    database: str, team: Quota, run_id: str, role: str, allowed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    login = f"quota_cli_{run_id}_{role}"
    with connect(database) as connection:
        connection.execute(f"CREATE ROLE {login} LOGIN PASSWORD 'secret' IN ROLE {role}".encode())
        try:
            parts = psycopg.conninfo.conninfo_to_dict(database)
            url = with_database(
                psycopg.conninfo.make_conninfo(database, user=login, password="secret"), str(parts["dbname"])
            )
            assert run_quota(*allowed, url=url).code == 0
            no = run_quota(*refused, url=url)
            assert no.code == 5
            assert "permission denied" in no.complaint
        finally:
            connection.execute(f"DROP ROLE {login}".encode())


def test_leases_show_whose_they_are_and_what_they_strand(team: Quota, database: str) -> None:
    with Client(database, timeout_s=30) as client, LeasedBudget(client, "key:42", {"usd": 10}) as budget:
        answer = budget.reserve({"usd": 4})
        assert answer.reservation is not None
        budget.settle(answer.reservation, {"usd": 3})
        budget.drive(budget.tending(budget.escrow))
        (hold,) = team("holds", "--json").rows
        assert hold["lease"]["pid"] == os.getpid()
        assert (hold["held"], hold["booked"], hold["stranded"]) == ({"usd": "10"}, {"usd": "3"}, {"usd": "7"})
        assert "usd=7" in team("holds").out
        assert team("reserve", "key:42", "usd=1", "--details", '{"lease": 1}').code == 0
        assert [row["stranded"] for row in team("holds", "--json").rows] == [{"usd": "7"}, None]


def test_reserve_waits_in_turn(team: Quota) -> None:
    assert team("reserve", "key:42", "usd=50", "--wait", "1s").code == 0
    ended = team("reserve", "key:42", "usd=1", "--wait", "0.1s")
    assert ended.code == 1
    assert "no room in " in ended.complaint
    assert "refused, held by limit" in ended.complaint
