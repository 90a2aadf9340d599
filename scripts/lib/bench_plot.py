"""Draws the curve of `scripts/bench --curve` as SVG: `bench_plot.py bench.json curve.svg`.

A function of our own and no library: the one plot has four lines a panel, and an SVG that carries its own styles is
legible on a light and on a dark page, which those of the libraries are not.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

PANEL = 250
GAP = 30
LEFT, TOP, HEIGHT = 70, 76, 250
# Name: on a light page, on a dark one. Classes and no variables: what draws SVG without a browser knows them too.
COLOURS = {
    "ink": ("#1f2328", "#f0f6fc"),
    "soft": ("#59636e", "#9198a1"),
    "rule": ("#d1d9e0", "#3d444d"),
    "page": ("#ffffff", "#0d1117"),
    "a": ("#0550ae", "#79c0ff"),
    "b": ("#0a7d33", "#56d364"),
    "c": ("#bc4c00", "#ffa657"),
    "d": ("#8250df", "#d2a8ff"),
    "e": ("#59636e", "#9198a1"),
}
# (calls of how many, budgets) -> what it is called, colour, dashes, mark
SERIES = {
    (100, 1000): ("batches of 100, 1,000 budgets", "a", "", "square"),
    (100, 1): ("batches of 100, one budget", "b", "6 3", "circle"),
    (1, 1000): ("single calls, 1,000 budgets", "c", "2 3", "triangle"),
    (1, 1): ("single calls, one budget", "d", "9 3 2 3", "diamond"),
}
FLOOR = ("F1: bare UPDATE of one row", "e", "1 4", "circle")
SHAPES = {
    "square": "M-4-4h8v8h-8z",
    "circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "triangle": "M0-5l5 9h-10z",
    "diamond": "M0-5.5l5.5 5.5l-5.5 5.5l-5.5-5.5z",
}


def style() -> str:
    """The style sheet: light, and dark for readers who prefer it."""
    light, dark = (
        "\n".join(
            f"  .{name}.fill {{ fill: {pair[n]}; }} .{name}.line {{ stroke: {pair[n]}; }}"
            for name, pair in COLOURS.items()
        )
        for n in (0, 1)
    )
    return (
        "\n  text { font: 12px system-ui, sans-serif; } .title { font-size: 14px; font-weight: 600; }"
        "\n  polyline { fill: none; stroke-width: 2; } line { stroke-width: 1; }\n"
        f"{light}\n  @media (prefers-color-scheme: dark) {{\n{dark}\n  }}\n"
    )


def mark(x: float, y: float, colour: str, shape: str) -> str:
    """One point of a series."""
    return f'<path d="{SHAPES[shape]}" transform="translate({x:.1f} {y:.1f})" class="{colour} fill"/>'


def text(x: float, y: float, words: object, look: str = "ink", anchor: str = "start") -> str:
    """A piece of text."""
    return f'<text class="{look} fill" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(str(words))}</text>'


def decades(rates: Sequence[float]) -> tuple[int, int]:
    """The powers of ten that hold all rates."""
    shown = [rate for rate in rates if rate > 0] or [1.0]
    low, high = math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown)))
    return low, max(high, low + 1)


def legend(width: int) -> list[str]:
    """The names of the series, in three columns above the panels."""
    found = []
    for n, (name, colour, dashes, shape) in enumerate([*SERIES.values(), FLOOR]):
        x, y = LEFT + (n % 3) * (width - LEFT) // 3, 38 + (n // 3) * 18
        found.append(f'<polyline points="{x},{y} {x + 26},{y}" class="{colour} line" stroke-dasharray="{dashes}"/>')
        found.append(mark(x + 13, y, colour, shape))
        found.append(text(x + 33, y + 4, name))
    return found


def plot(curve: Mapping[str, Any]) -> str:
    """Returns the SVG: granted pairs per second over clients, both logarithmic, a panel for each fill.

    Argument: `curve`, the member of that name in the report of `scripts/bench --curve`.
    """
    cells, floor = curve["cells"], {int(clients): rate for clients, rate in curve["f1_per_s"].items()}
    fills, clients = sorted({c["fill"] for c in cells}), sorted({c["clients"] for c in cells})
    low, high = decades([c["granted_per_s"] for c in cells] + list(floor.values()))
    width = LEFT + len(fills) * (PANEL + GAP)

    def across(panel: int, count: int) -> float:
        return LEFT + panel * (PANEL + GAP) + 16 + clients.index(count) * (PANEL - 32) / max(len(clients) - 1, 1)

    def up(rate: float) -> float:
        return TOP + 24 + HEIGHT * (1 - (math.log10(rate) - low) / (high - low))

    bottom = up(10**low)
    parts = [f'<rect class="page fill" width="{width}" height="{bottom + 56:.0f}"/>']
    parts.append(text(LEFT, 20, "Reserve + settle pairs granted per second, durable", "title ink"))
    parts += legend(width)
    for panel, fill in enumerate(fills):
        left, right = LEFT + panel * (PANEL + GAP), LEFT + panel * (PANEL + GAP) + PANEL
        parts.append(text(left, TOP + 10, f"budget {fill} % spent"))
        for power in range(low, high + 1):
            y = up(10**power)
            parts.append(f'<line class="rule line" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            if panel == 0:
                label = f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"
                parts.append(text(left - 8, y + 4, label, "soft", "end"))
        for count in clients:
            parts.append(text(across(panel, count), bottom + 18, count, "soft", "middle"))
        parts.append(text((left + right) / 2, bottom + 40, "clients (log)", anchor="middle"))
        lines = [
            (look, {c["clients"]: c["granted_per_s"] for c in cells
                    if (c["batch"], c["budgets"], c["fill"]) == (*key, fill)})
            for key, look in SERIES.items()
        ]  # fmt: skip
        for (name, colour, dashes, shape), rates in [*lines, (FLOOR, floor)]:
            # A logarithm has no place for none at all: that point is left out.
            points = [(across(panel, count), up(rates[count])) for count in clients if rates.get(count, 0) > 0]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" class="{colour} line" stroke-dasharray="{dashes}">'
                         f"<title>{escape(name)}</title></polyline>")  # fmt: skip
            parts += [mark(x, y, colour, shape) for x, y in points]
    middle = (TOP + 24 + bottom) / 2
    parts.append(
        f'<text class="ink fill" transform="translate(16 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        "pairs/s (log)</text>"
    )
    size = f'width="{width}" height="{bottom + 56:.0f}" viewBox="0 0 {width} {bottom + 56:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="Pairs per second over clients">'
    return "\n".join([head, f"<style>{style()}</style>", *parts, "</svg>"]) + "\n"


def main() -> None:
    """Draws the curve of a report."""
    source, target = map(Path, sys.argv[1:])
    target.write_text(plot(json.loads(source.read_text(encoding="utf-8"))["curve"]), encoding="utf-8")


if __name__ == "__main__":
    main()
