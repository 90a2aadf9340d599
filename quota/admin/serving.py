"""gunicorn's configuration: `quota serve`, or `gunicorn -c python:quota.admin.serving`.

Workers wait for the database, not for the processor, so each has threads; the pool has a connection for each thread
and no more. The application is made once, before the fork, and opens no connection; every worker opens its own when it
first needs them. Read from the environment, with the defaults that `quota serve --help` shows: QUOTA_BIND,
QUOTA_WORKERS, QUOTA_THREADS, and QUOTA_CACHE_S, QUOTA_PROXIES, QUOTA_RATE_LIMIT_HEADERS.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from quota.http.parents import on_starting

if TYPE_CHECKING:
    from flask import Flask

__all__ = ["application", "on_starting", "worker_exit"]

DEFAULT_BIND = "127.0.0.1:8080"
# Two a core of a small machine. With two in all, kept-open connections that fall to one of them leave half of it idle.
DEFAULT_WORKERS = 4
DEFAULT_THREADS = 2

bind = os.environ.get("QUOTA_BIND", "").strip() or DEFAULT_BIND
workers = int(os.environ.get("QUOTA_WORKERS", "").strip() or DEFAULT_WORKERS)
threads = int(os.environ.get("QUOTA_THREADS", "").strip() or DEFAULT_THREADS)
worker_class = "gthread"
wsgi_app = "quota.admin.serving:application()"
proc_name = "quota api"
# One import for all: what is made before the fork opens no connection, every worker has its own pool.
preload_app = True

# A request is over within the ledger's deadline; what takes longer is a proof of the books, a minute at most.
timeout = 90
graceful_timeout = 30
keepalive = 5
# Workers are renewed now and then, at different times.
max_requests = 100_000
max_requests_jitter = 10_000

limit_request_line = 8190
limit_request_fields = 50
limit_request_field_size = 4094
# Whose X-Forwarded-For is believed is told by QUOTA_PROXIES; gunicorn itself believes nobody.
forwarded_allow_ips = os.environ.get("QUOTA_FORWARDED_ALLOW_IPS", "127.0.0.1")

# One line of JSON a request comes from the application; it names the route, never the path or the body.
accesslog = None
errorlog = "-"
loglevel = "info"
control_socket_disable = True


def application() -> Flask:
    """Makes the application of one worker."""
    from quota.admin import create_app
    from quota.client import Client
    from quota.config import Settings
    from quota.http.logs import log_to_stderr, writing_lines

    log_to_stderr()
    settings = Settings.from_env()
    options: dict[str, Any] = {**Client.settings_of(settings), "fail_open": False}
    options["pool_max"] = max(threads, 1)
    style: Any = os.environ.get("QUOTA_RATE_LIMIT_HEADERS", "").strip() or "draft-11"
    client = Client(**options, application_name="quota api")
    app = create_app(
        client=client, cache_s=_cache_s(), rate_limit_headers=style, access_log=writing_lines("quota.admin")
    )
    proxies = int(os.environ.get("QUOTA_PROXIES", "").strip() or 0)
    if proxies:
        from werkzeug.middleware.proxy_fix import ProxyFix

        app.wsgi_app = ProxyFix(app.wsgi_app, x_for=proxies, x_proto=proxies)  # type: ignore[method-assign]
    return app


def _cache_s() -> float:
    from quota.authentication import CACHE_S

    return float(os.environ.get("QUOTA_CACHE_S", "").strip() or CACHE_S)


def worker_exit(server: Any, worker: Any) -> None:  # noqa: ARG001 - gunicorn's signature
    """Gives the worker's connections back."""
    app = getattr(worker, "wsgi", None)
    while app is not None and not hasattr(app, "extensions"):
        app = getattr(app, "app", None)
    if app is not None:
        app.extensions["quota"].close()
