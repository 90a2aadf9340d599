"""What of the bench computes and draws: percentiles, the plot. It measures elsewhere; nothing here is timed."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """What a module of scripts/lib defines, by its name."""
    monkeypatch.syspath_prepend(str(SCRIPTS / "lib"))
    before = set(sys.modules)
    yield lambda name: runpy.run_path(str(SCRIPTS / "lib" / f"{name}.py"))
    for name in set(sys.modules) - before:
        if name.startswith(("bench", "callers")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([float(n) for n in range(1, 101)], 99, 99.0),
        ([float(n) for n in range(1, 101)], 100, 100.0),
        ([float(n) for n in range(1, 102)], 99, 100.0),
        ([7.0], 1, 7.0),
        ([], 99, float("inf")),
    ],
)
def test_percentiles(
    module: Callable[[str], dict[str, Any]], values: list[float], percent: float, expected: float
) -> None:
    assert module("bench_kit")["percentile"](values, percent) == expected


def test_a_target_that_is_a_rate_is_a_least_one(module: Callable[[str], dict[str, Any]]) -> None:
    result = module("bench_kit")["result"]
    assert [result("P4", [(each, 1.0)], details={})["met"] for each in (6.9, 7.0)] == [False, True]
    assert [result("P1", [(each, 1.0)], details={})["met"] for each in (2.2, 2.3)] == [True, False]
    assert not result("P10", [(9.0, 1.0)], met=False, details={})["met"]


def test_a_part_whose_other_side_is_absent_is_left_out_and_the_others_run(
    module: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    defined = module("bench")

    def absent(_bench: object) -> dict[str, Any]:
        raise defined["AbsentError"]("Install it.")

    parts = {"G3": absent, "P7": lambda _bench: {"id": "P7"}}
    assert defined["measure"](None, ["G3", "P7"], parts) == ([{"id": "P7"}], {"G3": "Install it."})
    assert capsys.readouterr().err == "G3 is left out. Install it.\n"
    report: dict[str, Any] = {"results": [], "left_out": {"G3": "Install it."}, "machine": {}, "settings": {}}
    assert "G3 is left out. Install it." in defined["table"](report)


def test_the_limiter_s_part_says_what_to_install(
    module: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    defined = module("bench_limiter")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(defined["AbsentError"], match="apt-get install redis-server"):
        defined["g3"](None)
    monkeypatch.setitem(sys.modules, "flask_limiter", None)
    with pytest.raises(defined["AbsentError"], match=r"pip install 'flask-limiter\[redis\]"):
        defined["g3"](None)


def curve(rate: float) -> dict[str, Any]:
    """A curve of all cells, each with a rate of its own but the first."""
    cells = [
        {"batch": batch, "budgets": budgets, "fill": fill, "clients": clients, "granted_per_s": rate * (n + 1)}
        for n, (batch, budgets, fill, clients) in enumerate(product((1, 100), (1, 1000), (5, 50, 95), (1, 4, 16, 64)))
    ]
    return {"cells": cells, "f1_per_s": {"1": 900.0, "4": 1000.0, "16": 800.0, "64": 700.0}}


def test_the_plot_has_every_series_in_every_panel(module: Callable[[str], dict[str, Any]]) -> None:
    defined = module("bench_plot")
    root = ElementTree.fromstring(defined["plot"](curve(100.0)))
    drawn = [line.findtext(f"{SVG}title") for line in root.iter(f"{SVG}polyline") if len(line)]
    names = [name for name, *_ in [*defined["SERIES"].values(), defined["FLOOR"]]]
    assert sorted(name or "" for name in drawn) == sorted(names * 3)
    lines = [line.get("points", "").split() for line in root.iter(f"{SVG}polyline") if len(line)]
    assert {len(points) for points in lines} == {4}
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert {*names, "pairs/s (log)", "clients (log)", "1", "64"} <= set(texts)


def test_the_plot_stays_inside_its_frame(module: Callable[[str], dict[str, Any]]) -> None:
    root = ElementTree.fromstring(module("bench_plot")["plot"](curve(0.3)))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    points = [point for line in root.iter(f"{SVG}polyline") for point in line.get("points", "").split()]
    assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in (p.split(",") for p in points))


def test_the_plot_leaves_out_what_a_logarithm_cannot_show(module: Callable[[str], dict[str, Any]]) -> None:
    found = curve(100.0)
    found["cells"][0]["granted_per_s"] = 0.0
    root = ElementTree.fromstring(module("bench_plot")["plot"](found))
    lines = [line.get("points", "").split() for line in root.iter(f"{SVG}polyline") if len(line)]
    assert sorted(len(points) for points in lines) == [3] + [4] * 14


def test_redis_absent_is_said(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPTS / "lib/bench_redis.py")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "Redis is absent" in run.stderr
