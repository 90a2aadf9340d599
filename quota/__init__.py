"""A quota and budget ledger on PostgreSQL: hold the worst case first, settle the true cost, never pass the cap."""

from importlib.metadata import version as _version

from quota.calls import Reservation, Settlement
from quota.client import AsyncClient, AsyncHold, Client, Hold, run, run_async
from quota.errors import Misuse, QuotaError, Refused, SchemaMismatch, Shortage, Unavailable
from quota.ids import uuid7

__all__ = [
    "AsyncClient",
    "AsyncHold",
    "Client",
    "Hold",
    "Misuse",
    "QuotaError",
    "Refused",
    "Reservation",
    "SchemaMismatch",
    "Settlement",
    "Shortage",
    "Unavailable",
    "run",
    "run_async",
    "uuid7",
]

__version__: str = _version("quota-ledger")
