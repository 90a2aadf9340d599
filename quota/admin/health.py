"""Is it alive, is it ready, and is anything amiss that does not keep it from working?"""

from __future__ import annotations

from typing import Any

from flask import Response, current_app
from pydantic import Field

from quota.admin.access import PUBLIC
from quota.admin.changes import answer, ledger
from quota.admin.routes import blueprint, route
from quota.admin.types import Answer
from quota.authentication import Remembered
from quota.calls import pages
from quota.errors import QuotaError
from quota.http.problems import Problem

__all__ = ["health"]

health = blueprint("health", "For load balancers and on-call; takes no token.")

_LAG_S = 60
# Everybody may ask, so that nobody's asking may cost much.
_known: Remembered[dict[str, Any]] = Remembered(1.0, most=100)


class Alive(Answer):
    """The process answers."""

    status: str


class Ready(Answer):
    """The database answers and the schema is at head."""

    status: str = Field(description="ready, or degraded: it works, but something else is amiss.")
    degraded: list[str] = Field(description="What is amiss: reaper, check.")
    reaper_lag_s: int = Field(description="How long the oldest overdue hold has been waiting for the reaper.")
    last_check_at: str | None = Field(description="When the books were last proven over this API.")


@route(health, "get", "/health/live", PUBLIC, ok={200: Alive})
def live() -> Response:
    """Does the process answer? It asks nobody else."""
    return answer({"status": "live"})


@route(health, "get", "/health/ready", PUBLIC, ok={200: Ready})
def ready() -> Response:
    """Does the database answer, with the schema of this release? 503 when not. `degraded` never takes it down."""
    client = ledger()
    try:
        row = _known.get(client, lambda: client.call(pages.health())[0])
    except QuotaError:
        raise Problem(503, "not_ready", "The database does not answer, or has no ledger.") from None
    assert row is not None
    head = current_app.config["QUOTA_REVISION"]
    if row["revision"] != head:
        raise Problem(503, "not_ready", f"The schema is at revision {row['revision']}, this release needs {head}.")
    lag_s = max(0, int(row["lag_s"] or 0))
    amiss = [*(["reaper"] if lag_s > _LAG_S else []), *(["check"] if row["violations"] else [])]
    return answer({
        "status": "degraded" if amiss else "ready",
        "degraded": amiss,
        "reaper_lag_s": lag_s,
        "last_check_at": row["checked_at"],
    })  # fmt: skip
