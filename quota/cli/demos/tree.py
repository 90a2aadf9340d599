"""A tree of runs, seen at work: on a terminal it moves, elsewhere a line tells each event."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

from quota.calls import views
from quota.cli.screen import Screen, number
from quota.client import Client
from quota.errors import QuotaError

__all__ = ["News", "Node", "View", "watching"]

_LOOK_EVERY_S = 0.25


class News(NamedTuple):
    """What became of a run: it `started` below a parent with a slice, `called`, was `refused` something, or `ended`."""

    kind: str
    run: str
    parent: str = ""
    slice: Decimal = Decimal(0)
    text: str = ""


@dataclass
class Node:
    """One run, as the lead sees it."""

    name: str
    parent: str
    slice: Decimal
    calls: int = 0
    refused: list[str] = field(default_factory=list)
    state: str = "live"
    row: dict[str, Any] | None = None

    def figure(self, name: str) -> Decimal | None:
        """Where its slice stands: `spent`, `reserved` or `available` as last looked up."""
        return None if self.row is None else self.row[name]

    def document(self) -> dict[str, Any]:
        """The run for programs."""
        return {
            "run": self.name,
            "parent": self.parent,
            "slice": self.slice,
            "calls": self.calls,
            "refused": self.refused,
            **{name: self.figure(name) for name in ("spent", "reserved", "available")},
        }


class View:
    """The tree of runs: what each has made, and where its slice stands.

    Arguments:
        ledger: where the slices are looked up.
        user: the root, whose budget is sliced.
        pool: the pool that all draw on.
        line: told of what happened, in words.
    """

    def __init__(self, ledger: Client, user: str, pool: str, line: Callable[[str], None]) -> None:
        self.nodes: dict[str, Node] = {}
        self.user: dict[str, Any] | None = None
        self.pool: dict[str, Any] | None = None
        self._ledger = ledger
        self.names = user, pool
        self._line = line

    def see(self, news: News) -> None:
        """Takes news of a run in."""
        if news.kind == "started":
            self.nodes[news.run] = Node(news.run, news.parent, news.slice)
            self._line(f"{news.run} starts below {news.parent} with ${number(news.slice)}")
            return
        node = self.nodes[news.run]
        if news.kind == "called":
            node.calls += 1
        elif news.kind == "refused":
            node.refused.append(news.text)
            self._line(f"{news.run} is refused {news.text}")
        else:
            node.state = "ended"
            self._line(f"{news.run} ends after {node.calls} calls")

    def look(self) -> None:
        """Looks up where everything stands, at one instant."""
        found = self._ledger.call(views.balances(self._ledger.tenant))
        rows = {(row["subject"], row["unit"], row["kind"]): row for row in found}
        user, pool = self.names
        self.user, self.pool = rows[user, "usd", "budget"], rows[pool, "quota_tokens", "bucket"]
        for node in list(self.nodes.values()):
            node.row = rows.get((node.name, "usd", "budget"))


@contextmanager
def watching(ledger: Client, user: str, pool: str, screen: Screen) -> Iterator[View]:
    """Yields the view: a tree that moves on a terminal, a line per event otherwise. In the end it has looked at all."""
    if not screen.lively:
        view = View(ledger, user, pool, screen.line)
        yield view
        view.look()
        return
    from rich.live import Live

    view, over = View(ledger, user, pool, lambda _: None), threading.Event()

    def follow(live: Live) -> None:
        # A ledger that is away ends the demonstration elsewhere.
        with contextlib.suppress(QuotaError):
            while not over.wait(_LOOK_EVERY_S):
                view.look()
                live.update(_tree(view))

    with Live(refresh_per_second=8) as live:
        thread = threading.Thread(target=follow, args=(live,), daemon=True)
        thread.start()
        try:
            yield view
        finally:
            over.set()
            thread.join()
        view.look()
        live.update(_tree(view))


def _tree(view: View) -> Any:
    from rich.text import Text
    from rich.tree import Tree

    user, pool = view.names
    root = Tree(Text(f"{user}   {_money(view.user)}", "bold"))
    branches = {user: root}
    for node in list(view.nodes.values()):
        label = Text(f"{node.name}   {_money(node.row)}   calls {node.calls}", "dim" if node.state == "ended" else "")
        label.append("".join(f"   refused {text}" for text in node.refused[-1:]), "red")
        branches[node.name] = branches[node.parent].add(label)
    if view.pool is not None:
        left, most = view.pool["level"], number(view.pool["capacity"])
        root.add(Text(f"{pool}   {left:.0f} of {most} tokens a minute left", "cyan"))
    return root


def _money(row: dict[str, Any] | None) -> str:
    if row is None:
        return "..."
    return f"spent ${row['spent']:.4f}   held ${row['reserved']:.4f}   left ${row['available']:.4f}"
