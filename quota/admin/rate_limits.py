"""What the answer to a reservation tells about the limits that it was judged by: `RateLimit` and its relatives."""

from __future__ import annotations

from collections.abc import Collection

from flask import current_app

from quota.admin.changes import ledger, principal
from quota.calls import LimitsOf, Reservation
from quota.errors import QuotaError
from quota.http import headers

__all__ = ["STYLE", "limit_headers"]

STYLE = "QUOTA_RATE_LIMIT_HEADERS"


def limit_headers(subject: str, units: Collection[str], refusal: Reservation | None = None) -> list[tuple[str, str]]:
    """Returns the headers.

    Arguments:
        subject: who asked.
        units: what was asked for.
        refusal: the answer, when it was refused: its own balances and waits are told, of one snapshot. None: granted,
            and balances are those after it.
    """
    style: headers.Style = current_app.config[STYLE]
    try:
        states = ledger().call(LimitsOf(subject, principal().tenant))
    except QuotaError:
        return []  # the decision stands without them
    if refusal is None:
        policies, violated = headers.of_states(states, subject, units), None
    else:
        policies, violated = headers.of_refusal(refusal, states, subject)
    return [*headers.rate_limit_headers(policies, style, violated), *headers.full_after(policies)]
