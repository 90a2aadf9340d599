"""Commands of `quota.calls` as requests of the HTTP API: which method and path does the same, and with which body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quota.calls import (
    Call,
    CreateSubject,
    CreateTenant,
    CreateUnit,
    Freeze,
    MoveSubject,
    RemoveLimit,
    RenameKey,
    RetireSubject,
    RetireTier,
    RevokeKey,
    RevokeToken,
    SetKeyExpiry,
    SetLimit,
    SetRateTier,
    Unfreeze,
)
from quota.errors import InvalidArgument
from quota.http.values import path_of

__all__ = ["request_of"]

Request = tuple[str, str, dict[str, Any] | None]
"""Method, path below `/v1`, body."""


def _members(call: Call[Any], *names: str) -> dict[str, Any]:
    return {name: getattr(call, name) for name in names}


def _given(call: Call[Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in _members(call, *names).items() if value is not None}


def _set_tier(call: SetRateTier) -> Request:
    kind, _, identity = call.subject.partition(":")
    if kind != "key":
        raise InvalidArgument(f'invalid_argument: "{call.subject}" has no tier of its own', "Only keys have one")
    return "POST", "/keys/set-tier", {"ids": [identity], "rate_tier": call.tier}


_NUMBERS = ("unit", "kind", "capacity", "refill_per_s", "period", "time_zone", "on_expiry", "required")
_REQUESTS: Mapping[type[Call[Any]], Callable[[Any], Request]] = {
    CreateTenant: lambda call: ("POST", "/tenants", _members(call, "name")),
    CreateUnit: lambda call: ("POST", "/units", _members(call, "name", "money")),
    CreateSubject: lambda call: ("POST", "/subjects", _given(call, "name", "parent", "rate_tier")),
    MoveSubject: lambda call: ("PATCH", path_of("subjects", call.name), _members(call, "parent")),
    Freeze: lambda call: ("POST", path_of("subjects", call.name, "freeze"), _members(call, "reason")),
    Unfreeze: lambda call: ("POST", path_of("subjects", call.name, "unfreeze"), None),
    RetireSubject: lambda call: ("POST", path_of("subjects", call.name, "retire"), {}),
    SetLimit: lambda call: ("PUT", path_of("limits", call.subject, call.name), _members(call, *_NUMBERS)),
    RemoveLimit: lambda call: ("DELETE", path_of("limits", call.subject, call.name), None),
    SetRateTier: _set_tier,
    RetireTier: lambda call: ("POST", path_of("tiers", call.tier, "retire"), {"builtin": call.tenant is None}),
    RenameKey: lambda call: ("PATCH", path_of("keys", call.id), _members(call, "name")),
    SetKeyExpiry: lambda call: ("PATCH", path_of("keys", call.id), _members(call, "expires_at")),
    RevokeKey: lambda call: ("POST", path_of("keys", call.id, "revoke"), _members(call, "reason")),
    RevokeToken: lambda call: ("POST", path_of("tokens", call.id, "revoke"), _members(call, "reason")),
}


def request_of(call: Call[Any]) -> Request:
    """Returns the request that does what a command does. Its tenant is the request's own affair."""
    return _REQUESTS[type(call)](call)
