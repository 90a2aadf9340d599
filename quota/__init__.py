"""A quota and budget ledger on PostgreSQL: hold the worst case first, settle the true cost, never pass the cap."""

from importlib.metadata import version as _version

__version__: str = _version("quota-ledger")
