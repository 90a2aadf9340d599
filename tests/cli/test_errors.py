"""Mistakes get one line that names the value and the remedy, an exit code that scripts can use, and never a secret."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import click
import pytest

from quota.cli import cli
from tests.cli.conftest import Quota, run_quota, said

URL = "postgresql://quota:hunter2@127.0.0.1:{port}/quota"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["bogus"], "quota: No such command 'bogus'. See: quota --help"),
        (["demo", "gatewy"], "Did you mean 'gateway'? See: quota demo --help"),
        (["reserve"], "quota: Missing argument 'SUBJECT'. See: quota reserve --help"),
        (["reserve", "key:42", "usd"],
         'quota: "usd" is no cost; write unit=amount, such as usd=0.25. See: quota reserve --help'),
        (["reserve", "key:42", "usd=1e3"],
         'quota: "1e3" in "usd=1e3" is no amount; write digits, such as usd=0.25. See: quota reserve --help'),
        (["reserve", "key:42", "usd=1", "usd=2"], 'quota: the unit "usd" stands twice; name each once'),
        (["reserve", "key:42", "usd=1", "--ttl", "10"],
         'quota: Invalid value for \'--ttl\': "10" is no duration; write a number with its unit, such as 10s'),
        (["reserve", "key:42", "usd=1", "--details", "[1]"],
         "quota: Invalid value for '--details': \"[1]\" is no JSON object"),
        (["reserve", "key:42", "usd=1", "--details", '{"a": 1, "a": 2}'], 'the key "a" stands twice'),
        (["limit", "set", "team:a", "x", "--unit", "usd", "--capacity", "-1"], '"-1" is no amount'),
        (["replay", "--price-in", "0.0000001"], '"0.0000001" is no price'),
        (["migrate", "9999"], 'quota: no revision "9999" in this release; it has 0001'),
        (["migrate", "base"], "say so with --down"),
        (["balance", "key:42", "--database-url", ""], "quota: --database-url is empty"),
        (["balance", "key:42", "--database-url", "postgresql://a/b", "--data", "/x"], "name two servers"),
        (["balance", "key:42", "--database-url", "mysql://me:hunter2@h/db"],
         'quota: --database-url: "mysql://me:***@h/db" has the scheme "mysql", not postgresql'),
        (["subject", "move", "key:42"], "give either --parent SUBJECT or --to-root"),
        (["sql", "nonsense"], "'nonsense' is not one of"),
    ],
)  # fmt: skip
def test_mistakes_on_the_command_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    line: str,
) -> None:
    monkeypatch.delenv("QUOTA_DATABASE_URL", raising=False)
    # Costs are read when the session is open: point at a server that is never asked.
    monkeypatch.setattr("quota.cli.store._require_schema", lambda *_: None)
    if not {"--database-url", "--data"} & set(arguments):
        monkeypatch.setenv("QUOTA_DATABASE_URL", "postgresql://quota@127.0.0.1:9/quota")
    ended = said(capsys, *arguments)
    assert ended.code == 2
    assert line in ended.complaint
    assert "hunter2" not in ended.err + ended.out


def test_with_json_the_error_is_a_document_too(team: Quota) -> None:
    ended = team("reserve", "key:42", "eur=1", "--json")
    assert ended.code == 2
    error = ended.document["error"]
    assert (error["name"], error["exit_code"]) == ("unknown_unit", 2)
    assert 'no unit "eur"' in error["message"]
    assert error["hint"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["reserve", "key:43", "usd=1"], "unknown_subject"),
        (["reserve", "key:42", "usd=0.0000000000001"], "invalid_amount"),
        (["settle", "nonsense"], "invalid_argument"),
        (["release", "01890a5d-ac96-774b-bcce-b302099a8057"], "unknown_reservation"),
        (["tier", "set", "key:42", "gold"], "unknown_tier"),
        (["balance", "key:42", "--tenant", "nobody"], "unknown_tenant"),
    ],
)
def test_misuse_is_exit_code_2_and_bears_its_name(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    database: str,
    arguments: list[str],
    name: str,
) -> None:
    monkeypatch.setenv("QUOTA_DATABASE_URL", database)
    said(capsys, "subject", "create", "key:42")
    ended = said(capsys, *arguments)
    assert ended.code == 2
    assert ended.complaint.startswith(f"quota: {name}: ")


def test_a_database_that_is_away_is_exit_code_3() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, and nobody listens
        url = URL.format(port=closed.getsockname()[1])
        ended = run_quota("balance", "key:42", "--json", url=url, QUOTA_TIMEOUT_S="1")
    assert ended.code == 3
    assert ended.document["error"]["name"] == "unavailable"
    assert "quota:***@127.0.0.1" in ended.complaint
    assert "hunter2" not in ended.out + ended.err


def test_a_server_that_never_answers_does_not_hang_the_command() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = URL.format(port=silent.getsockname()[1])
        ended = run_quota("check", url=url, QUOTA_TIMEOUT_S="1")
    assert ended.code == 3
    assert "no connection within 1 s" in ended.complaint


def test_a_setting_that_is_wrong_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUOTA_POOL_MAX", "many")
    ended = said(capsys, "check")
    assert (ended.code, "QUOTA_POOL_MAX" in ended.complaint) == (2, True)


def test_a_fault_is_one_line_and_shows_its_traceback_on_demand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setenv("QUOTA_DATABASE_URL", "postgresql://quota@127.0.0.1:9/quota")
    monkeypatch.setattr("quota.cli.store._require_schema", broken)
    ended = said(capsys, "check")
    assert (ended.code, ended.complaint) == (70, "quota: ZeroDivisionError: oops. QUOTA_DEBUG=1 shows where")
    monkeypatch.setenv("QUOTA_DEBUG", "1")
    assert "Traceback" in said(capsys, "check").err


def test_a_reader_that_leaves_is_no_fault() -> None:
    # `quota sql --all | head -1`, made certain: nobody will read a byte.
    import subprocess

    from tests.cli.conftest import QUOTA, environment

    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([QUOTA, "sql", "--all"], stdout=write, stderr=subprocess.PIPE, env=environment(None))
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


# -- help -----------------------------------------------------------------------------------------------------------


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    """Returns every command that does something, with its path."""
    found = []
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
        else:
            found.append(((*path, name), command))
    return found


COMMANDS = commands(cli)


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_every_command_teaches(path: tuple[str, ...], command: click.Command) -> None:
    assert command.help
    assert command.epilog is not None, "no example"
    assert "Examples:" in command.epilog
    options = {option for parameter in command.params for option in parameter.opts}
    # What answers nothing has no form of an answer.
    assert path in (("completion",), ("serve",)) or "--json" in options
    for line in command.epilog.splitlines()[2:]:
        _parsed(line.strip())


def _parsed(line: str) -> None:
    """Parses every `quota …` of an example line as a shell would hand it over, and runs none."""
    import re
    import shlex

    text = re.sub(r"[a-z]+=\$\((.*?)\)", r"\1", line)
    text = re.sub(r'eval "\$\((.*)\)"', r"\1", text)
    for part in re.split(r"&&|\||>", text):
        words = shlex.split(part)
        if not words or words[0] != "quota":
            continue
        group: click.Command = cli
        context = None
        words = words[1:]
        while isinstance(group, click.Group):
            __, command, words = group.resolve_command(click.Context(group), list(words))
            assert command is not None
            group = command
        context = group.make_context(group.name, list(words))
        context.close()


def test_the_top_help_lists_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    ended = said(capsys, "--help")
    assert ended.code == 0
    for name in cli.commands:
        assert f"\n  {name} " in ended.out
    for code in ("0", "1", "2", "3", "4", "5", "70"):
        assert f"\n    {code} " in ended.out


def test_version_and_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version").out.startswith("quota ")
    assert said(capsys, "completion", "bash").out == 'eval "$(_QUOTA_COMPLETE=bash_source quota)"\n'
    completed = run_quota(url=None, _QUOTA_COMPLETE="bash_complete", COMP_WORDS="quota bal", COMP_CWORD="1")
    assert completed.out == "plain,balance\n"


def test_sql_shows_the_truth(capsys: pytest.CaptureFixture[str]) -> None:
    from quota import sql

    assert said(capsys, "sql", "reserve").out == sql.text("reserve")
    listed = said(capsys, "sql").out.splitlines()
    assert [line.split()[0] for line in listed[1:]] == list(sql.FILES)
    assert [json.loads(line)["name"] for line in said(capsys, "sql", "--json").out.splitlines()] == list(sql.FILES)
