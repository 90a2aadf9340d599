"""The one exception of the model: misuse, named exactly as the contract names it."""

from __future__ import annotations

ERROR_NAMES = (
    "unknown_tenant",
    "unknown_subject",
    "unknown_unit",
    "unknown_limit",
    "unknown_tier",
    "unknown_reservation",
    "no_limit",
    "unit_missing",
    "unit_not_held",
    "invalid_costs",
    "invalid_amount",
    "amount_out_of_range",
    "invalid_name",
    "invalid_ttl",
    "invalid_argument",
    "id_conflict",
    "already_settled",
    "already_released",
    "expired",
    "total_decreased",
    "parent_differs",
    "limit_differs",
    "cycle",
    "too_deep",
    "has_open_holds",
    "already_exists",
)
"""In the order of their SQLSTATEs: the n-th name (from 1) is QT00n."""


class ModelError(Exception):
    """Misuse of an operation. Raised before the operation changed anything: an error leaves no trace."""

    def __init__(self, name: str, detail: str = "") -> None:
        if name not in ERROR_NAMES:
            raise ValueError(f"{name} is not an error of the contract")
        super().__init__(f"{name}: {detail}" if detail else name)
        self.name = name


def sqlstate_name(sqlstate: str | None) -> str | None:
    """The contract's error name of a SQLSTATE; None for one that is not ours."""
    if sqlstate is None or not sqlstate.startswith("QT0") or not sqlstate[3:].isdigit():
        return None
    number = int(sqlstate[3:])
    return ERROR_NAMES[number - 1] if 1 <= number <= len(ERROR_NAMES) else None
