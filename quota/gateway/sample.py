"""A small query API to stand behind the gateway: rows of tables, series and current values from data nodes that it only
pretends to ask. What `quota demo gateway` and the documentation call; any Flask application would do, unchanged but for
`set_cost`.
"""

from __future__ import annotations

import time
from typing import Any

from flask import Flask, Response, jsonify, request

from quota.http.cost_header import set_cost

__all__ = ["PAGE_MAX", "create_app"]

PAGE_MAX = 300
_TABLES = {"orders": 10_000, "users": 250, "events": 0}
_SLOW_S = 5.0


def create_app() -> Flask:
    """Makes the application."""
    app = Flask("quota.gateway.sample")

    @app.get("/v1/tables")
    def tables() -> Response:
        return _page(sorted(_TABLES), len(_TABLES))

    @app.get("/v1/rows/<table>")
    def rows(table: str) -> Response:
        total = _TABLES.get(table, 0)
        found = [{"id": number, "table": table} for number in range(min(_limit(), total))]
        return _page(found, total)

    @app.get("/v1/current")
    def current() -> Response:
        found = [{"id": one, "value": len(one)} for one in _ids()[:PAGE_MAX]]
        return _page(found, len(found), node_calls=1)

    @app.get("/v1/series")
    def series() -> Response:
        # One call to a data node for each operating unit, however many of its series are asked for.
        units = {one.partition(".")[0] for one in _ids()}
        found = [{"time": minute, "values": len(units)} for minute in range(_limit())] if units else []
        return _page(found, len(found), node_calls=len(units))

    @app.get("/v1/broken")
    def broken() -> Response:
        raise RuntimeError("the sample's own fault, on purpose")

    @app.get("/v1/slow")
    def slow() -> Response:
        time.sleep(_SLOW_S)
        return _page([], 0)

    return app


def _page(found: list[Any], total: int, *, node_calls: int = 0) -> Response:
    """The one shape of an answer: the rows of this page are what it costs, whatever the total is."""
    answer = jsonify({"rows": found, "total": total})
    set_cost(answer, len(found), node_calls)
    return answer


def _limit() -> int:
    text = request.args.get("limit", "")
    return min(int(text), PAGE_MAX) if text.isascii() and text.isdigit() and int(text) else PAGE_MAX


def _ids() -> list[str]:
    return [one for text in request.args.getlist("ids") for one in text.split(",") if one]
