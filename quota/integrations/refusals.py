"""Refusals of calls, counted where they happen and told to the ledger in sums (docs/decisions/0026).

A refusal leaves nothing behind in the ledger. Whoever was refused tells so afterwards, by a record of nothing now and
then: no account is touched, and however many refusals there were, it is one row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from quota.calls import Reservation

__all__ = ["METER", "Refusals"]

logger = logging.getLogger("quota.integrations")

METER = "meter:refusals"
"""The subject of these records. It has no limits, so that none of them moves a counter."""

_EVERY_S = 10.0
_KINDS_MAX = 1000
_NAMED = ("provider", "model", "route", "reason", "limit_subject", "limit_name")


class Refusals:
    """Counts refusals by what was asked and which limit refused it, until they are told. For threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[object, ...], list[int]] = {}
        self._told_at = float("-inf")

    def count(self, asked: Mapping[str, object], refusal: Reservation) -> None:
        """Counts one. Arguments: `asked`, the details of the hold that was refused; `refusal`, the answer."""
        key = (
            asked.get("provider"), asked.get("model"), asked.get("route"),
            refusal.reason, refusal.limit_subject, refusal.limit_name,
        )  # fmt: skip
        self._add(key, 1, int(asked.get("attempt", 1) != 1))

    def _add(self, key: tuple[object, ...], refused: int, retried: int) -> None:
        with self._lock:
            if key not in self._counts and len(self._counts) >= _KINDS_MAX:
                logger.warning("refusals of more than %d kinds wait to be told; one is left out", _KINDS_MAX)
                return
            counts = self._counts.setdefault(key, [0, 0])
            counts[0] += refused
            counts[1] += retried

    def due(self, *, now: bool) -> dict[str, Any] | None:
        """Takes out what is to be told, as the details of a record; None when there is nothing, or it is not time yet.

        Arguments: `now`, whether it is time or not.
        """
        with self._lock:
            moment = time.monotonic()
            if not self._counts or not (now or moment - self._told_at >= _EVERY_S):
                return None
            counts, self._counts, self._told_at = self._counts, {}, moment
        return {
            "refusals": [
                {**dict(zip(_NAMED, key, strict=True)), "refused": refused, "retried": retried}
                for key, (refused, retried) in counts.items()
            ]
        }

    def put_back(self, told: Mapping[str, Any], error: Exception) -> None:
        """Takes back what could not be told."""
        logger.info("refusals are told later: %s", error)
        for one in told["refusals"]:
            self._add(tuple(one[name] for name in _NAMED), one["refused"], one["retried"])
