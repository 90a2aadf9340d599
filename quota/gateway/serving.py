"""gunicorn's configuration of the gateway: `quota gateway`, or `gunicorn -c python:quota.gateway.serving`.

Workers are event loops: one serves many callers at a time, so there are as many as processors. Read from the
environment: QUOTA_GATEWAY_CONFIG (the file), QUOTA_UPSTREAM (instead of the file's), QUOTA_BIND, QUOTA_WORKERS, and
what the ledger's client takes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from quota.http.parents import on_starting

if TYPE_CHECKING:
    from quota.gateway.front import Gateway

__all__ = ["application", "on_starting"]

DEFAULT_BIND = "127.0.0.1:8081"
DEFAULT_WORKERS = 1

bind = os.environ.get("QUOTA_BIND", "").strip() or DEFAULT_BIND
workers = int(os.environ.get("QUOTA_WORKERS", "").strip() or DEFAULT_WORKERS)
worker_class = "quota.gateway.worker.HttpWorker"
wsgi_app = "quota.gateway.serving:application()"
proc_name = "quota gateway"
asgi_lifespan = "on"

# A worker that does not come round for so long hangs; calls may take as long as their routes let them.
timeout = 60
# In flight at a stop: so long for the upstream to answer and for everything to be settled.
graceful_timeout = 30
keepalive = 15
# A call whose client has left ends by itself, and is never stopped in the middle of its settlement.
asgi_disconnect_grace_period = 3600
max_requests = 1_000_000
max_requests_jitter = 100_000

limit_request_line = 8190
limit_request_fields = 100
limit_request_field_size = 16_384
# Nobody's word is taken for where a request came from, and no header for another one.
forwarded_allow_ips = ""
header_map = "drop"

accesslog = None
errorlog = "-"
loglevel = "info"
control_socket_disable = True


def application() -> Gateway:
    """Makes the application of one worker."""
    from quota.config import Settings
    from quota.gateway import create_gateway
    from quota.gateway.config import read_config
    from quota.http.logs import log_to_stderr

    log_to_stderr()
    config = read_config(Path(os.environ["QUOTA_GATEWAY_CONFIG"]), upstream=os.environ.get("QUOTA_UPSTREAM") or None)
    return create_gateway(config, Settings.from_env())
