"""What G3 serves: a small query API in Flask, the same in the metering middleware, and the same under Flask-Limiter.

Read from the environment: QUOTA_DATABASE_URL, and BENCH_REDIS, where Flask-Limiter counts.
"""

from __future__ import annotations

import os
from typing import Any

from flask import Flask, jsonify, request
from gateway_apps import LEASE, QUERY, ROWS
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool

from quota import Client, credentials
from quota.config import Settings
from quota.http.cost_header import set_cost
from quota.integrations.wsgi import MeteringMiddleware
from quota.metering import Leasing, Policy, Route

# As generous as the key's limits are, and windows that begin with the first request: Flask-Limiter's cheapest way.
LIMITS = "1000000000 per second; 1000000000 per hour"


def bare() -> Flask:
    """The API: a page of a hundred rows, and what it cost."""
    app = Flask(__name__)
    pool: Any = ConnectionPool(os.environ["QUOTA_DATABASE_URL"], open=True, kwargs={"row_factory": dict_row})

    @app.get("/v1/rows/orders")
    def rows() -> Any:
        limit = request.args.get("limit", ROWS, int)
        with pool.connection() as connection:
            page = connection.execute(QUERY, {"limit": min(limit, ROWS)}, prepare=True).fetchall()
        response = jsonify(total=10_000, rows=page)
        set_cost(response, len(page))
        return response

    return app


def metered(lease: Leasing | None = None) -> Flask:
    """The API in the middleware."""
    app = bare()
    client = Client(**Client.settings_of(Settings.from_env()), coalesce=True)
    policy = Policy(routes=(Route("/v1/rows/<table>"),), lease=lease)
    app.wsgi_app = MeteringMiddleware(app.wsgi_app, client, policy)  # type: ignore[method-assign]
    return app


def leased() -> Flask:
    """The API in the middleware, with leases."""
    return metered(Leasing(size=LEASE))


def limited() -> Flask:
    """The API under Flask-Limiter, which counts the requests of a key and takes its word for who it is."""
    from flask_limiter import Limiter  # may be absent: then only this side is

    app = bare()
    Limiter(_key, app=app, storage_uri=os.environ["BENCH_REDIS"], strategy="fixed-window", default_limits=[LIMITS])
    return app


def _key() -> str:
    found = credentials.read(request.headers.get("Authorization", "").removeprefix("Bearer "), credentials.KEY)
    return found.id if found else "anonymous"
