"""`gateway.toml`: what stands in it, and what is said when that is wrong: file, line and remedy.

upstream = "http://127.0.0.1:9000"

[[routes]]
path = "/v1/rows/<table>"
estimate = { page_limit = 300 }
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from quota.config import ConfigError
from quota.costs.rows import Estimator, fixed, id_count, minimum, page_limit, through_nodes
from quota.gateway import forward
from quota.gateway.bounds import Period, Targets
from quota.gateway.jwks import ALGORITHMS
from quota.gateway.toml_lines import line_of
from quota.metering import Bound, FailOpen, Leasing, Policy, Route

__all__ = ["GatewayConfig", "OAuthTable", "RouteTable", "read_config"]

_AT = re.compile(r" \(at line (\d+), column \d+\)")
_MOST = 10**15

_SPAN = re.compile(r"(\d{1,9})(ms|s|m|h|d)")
_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_HEADER_NAME = re.compile(r"[a-z0-9!#$%&'*+.^`|~-]+")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_ALGORITHMS = sorted({name for names in ALGORITHMS.values() for name in names})


# -- values ---------------------------------------------------------------------------------------------------------


def _span(value: object) -> timedelta:
    match = _SPAN.fullmatch(value) if isinstance(value, str) else None
    if match is None or not int(match[1]):
        raise ValueError(
            f'{_shown(value)} is no duration; write a number with its unit, such as "500ms", "30s" or "31d"'
        )
    return timedelta(milliseconds=int(match[1]) * _UNITS_MS[match[2]])


def _origin(value: str) -> str:
    try:
        parts = urlsplit(value)
        proper = parts.scheme in ("http", "https") and parts.hostname and not (parts.username or parts.password)
        proper = proper and not (parts.path.strip("/") or parts.query or parts.fragment) and parts.port != 0
    except ValueError:
        proper = False
    if not proper:
        raise ValueError(f'{_shown(value)} is no origin; write scheme, host and port, such as "http://127.0.0.1:9000"')
    return value.rstrip("/")


def _key_address(value: str) -> str:
    parts = urlsplit(value)
    secure = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)
    if not secure or not parts.hostname:
        raise ValueError(f"{_shown(value)} is no address to take keys from; write one with https")
    return value


def _algorithm(value: str) -> str:
    if value not in _ALGORITHMS:
        known = ", ".join(_ALGORITHMS)
        raise ValueError(f"{_shown(value)} is no asymmetric algorithm that is known here; write one of {known}")
    return value


def _path(value: str) -> str:
    if not value.startswith("/") or any(character in value for character in "?# \\"):
        raise ValueError(f'{_shown(value)} is no path; write one that starts with /, such as "/v1/rows/<table>"')
    return value


def _share(value: object) -> Decimal:
    """A share of a capacity; TOML writes it as a binary fraction, whose shortest decimal form is what was meant."""
    try:
        share = Decimal(str(value))
    except InvalidOperation:
        share = Decimal(-1)
    if not 0 <= share < 1:
        raise ValueError(f"{_shown(value)} is no share; write 0 to below 1, such as 0.2")
    return share


def _method(value: str) -> str:
    if re.fullmatch(r"[A-Z]+", value) is None or value in ("CONNECT", "TRACE"):
        raise ValueError(f'{_shown(value)} is no method that is passed on; write it in capitals, such as "GET"')
    return value


def _header(value: str) -> str:
    if _HEADER_NAME.fullmatch(value.lower()) is None:
        raise ValueError(f'{_shown(value)} is no name of a header; write one such as "x-tenant-id"')
    return value.lower()


_ESTIMATES = '{ page_limit = 300 }, { id_count = "ids" }, { fixed = 1 }, { minimum = [...] } or { through_nodes = ... }'


def _estimate(value: object) -> Estimator:
    """Reads an inline table that names one estimator and its settings."""
    if callable(value):
        return value
    match dict(value) if isinstance(value, Mapping) else {}:
        case {"page_limit": int(most), **rest}:
            return page_limit(_at_least_1("page_limit", most), **_text(rest, "parameter"))
        case {"id_count": str(parameter), **rest}:
            return id_count(parameter, **_numbers(rest, "most"))
        case {"fixed": int(cost), **rest}:
            return fixed(_at_least_1("fixed", cost), **_numbers(rest))
        case {"minimum": [_, *_] as listed, **rest} if not rest:
            return minimum(*(_estimate(one) for one in listed))
        case {"through_nodes": rows, **rest} if "calls" in rest:
            return through_nodes(_estimate(rows), **_numbers(rest, "calls", "percent"))
    raise ValueError(f"{_shown(value)} is no estimate; write {_ESTIMATES}")


def _at_least_1(name: str, value: int) -> int:
    if isinstance(value, bool) or not 1 <= value <= 10**15:
        raise ValueError(f"{name} is {_shown(value)}; write a whole number from 1 on")
    return value


def _numbers(rest: Mapping[str, object], *known: str) -> dict[str, Any]:
    for name, value in rest.items():
        if name not in known:
            raise ValueError(f'"{name}" is nothing that this estimate takes; leave it out')
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 10**15:
            raise ValueError(f"{name} is {_shown(value)}; write a whole number")
    return dict(rest)


def _text(rest: Mapping[str, object], *known: str) -> dict[str, Any]:
    for name, value in rest.items():
        if name not in known or not isinstance(value, str) or not value:
            raise ValueError(f'"{name}" is nothing that this estimate takes, or no text; leave it out')
    return dict(rest)


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


Span = Annotated[timedelta, BeforeValidator(_span)]
HeaderName = Annotated[str, AfterValidator(_header)]
Whole = Annotated[int, Field(strict=True, ge=0, le=_MOST)]
Text = Annotated[str, Field(min_length=1, max_length=200)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


# -- tables ---------------------------------------------------------------------------------------------------------


class FailOpenTable(_Table):
    """`fail_open` of a route: what each process lets pass while the ledger is away, in units of the route's cost."""

    capacity: Annotated[int, Field(ge=1, le=_MOST)]
    refill_per_s: Whole


class RouteTable(_Table):
    """`[[routes]]`: how the requests of one kind are metered, and what they may ask and take."""

    path: Annotated[str, AfterValidator(_path)]
    methods: tuple[Annotated[str, AfterValidator(_method)], ...] = Field(default=(), strict=False)
    name: Text | None = None
    metered: bool = True
    estimate: Annotated[Any, BeforeValidator(_estimate)] = page_limit()
    unit: Text = "cost"
    minimum_charge: Whole = 0
    failure_charge: Whole = 1
    on_timeout: Literal["charge", "hold"] = "charge"
    overrun: Literal["book", "cap"] = "book"
    fail_open: FailOpenTable | None = None
    headroom: Annotated[Decimal, BeforeValidator(_share)] = Decimal(0)
    leased: bool = True
    targets: Text = "ids"
    max_targets: Annotated[int, Field(ge=1)] | None = None
    period: tuple[Text, Text] = Field(default=("from", "to"), strict=False)
    max_period: Span | None = None
    upstream_timeout: Span = timedelta(seconds=forward.UPSTREAM_S)
    max_response_bytes: Annotated[int, Field(ge=1)] | None = None

    def route(self) -> Route:
        """The route as the metering takes it. Errors: `ConfigError`."""
        bounds: list[Bound] = []
        if self.max_targets is not None:
            bounds.append(Targets(self.targets, self.max_targets))
        if self.max_period is not None:
            bounds.append(Period(*self.period, self.max_period))
        return Route(
            self.path,
            self.methods,
            self.name or "",
            metered=self.metered,
            estimate=self.estimate,
            unit=self.unit,
            bounds=tuple(bounds),
            minimum_charge=self.minimum_charge,
            failure_charge=self.failure_charge,
            on_timeout=self.on_timeout,
            overrun=self.overrun,
            fail_open=None if self.fail_open is None else FailOpen(**self.fail_open.model_dump()),
            headroom=self.headroom,
            leased=self.leased,
            # A hold must not expire under a call that is still allowed to last: its answer prolongs it from then on.
            ttl=max(timedelta(minutes=10), 2 * self.upstream_timeout),
        )

    def limits(self) -> forward.Bounds:
        """What the upstream may take for one answer."""
        return forward.Bounds(upstream_s=self.upstream_timeout.total_seconds(), response_bytes=self.max_response_bytes)


class LeaseTable(_Table):
    """`[lease]`: what each process decides from memory, for callers who ask often."""

    size: Annotated[int, Field(ge=1, le=_MOST)]
    unit: Text = "cost"
    most: Annotated[int, Field(ge=1, le=_MOST)] | None = None
    leaves: Annotated[Decimal, BeforeValidator(_share)] = Leasing.leaves
    from_per_s: Annotated[int, Field(ge=1, le=_MOST)] = Leasing.from_per_s
    callers: Annotated[int, Field(ge=1, le=_MOST)] = Leasing.callers
    ttl: Span = Leasing.ttl
    idle: Span = Leasing.idle
    post_every: Span = Leasing.post_every

    @model_validator(mode="after")
    def _fits(self) -> Self:
        try:
            self.leasing()
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("lease: ")) from None
        return self

    def leasing(self) -> Leasing:
        """As the metering takes it."""
        return Leasing(**{name: getattr(self, name) for name in type(self).model_fields})


class HeadersTable(_Table):
    """`[headers]`: what goes with requests and answers."""

    style: Literal["draft-11", "legacy", "none"] = "draft-11"
    show_cost: bool = False
    subject: HeaderName | None = "x-quota-subject"
    drop: tuple[HeaderName, ...] = Field(default=(), strict=False)
    pass_credentials: bool = False


class OAuthTable(_Table):
    """`[oauth]`: whose access tokens are taken."""

    issuer: Text
    audience: Text
    jwks_url: Annotated[str, AfterValidator(_key_address)] | None = None
    jwks_file: Text | None = None
    algorithms: tuple[Annotated[str, AfterValidator(_algorithm)], ...] = Field(
        default=("RS256",), strict=False, min_length=1
    )
    leeway: Span = timedelta(seconds=10)
    connection_claim: Text = "sid"
    user_claim: Text | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.jwks_url is None) == (self.jwks_file is None):
            raise ValueError("the keys of the issuer come from one place; write either jwks_url or jwks_file")
        if self.leeway > timedelta(minutes=5):
            raise ValueError('leeway is more than clocks differ by; write at most "5m"')
        return self


class GatewayConfig(_Table):
    """`gateway.toml`."""

    upstream: Annotated[str, AfterValidator(_origin)]
    keys: bool = True
    connect_timeout: Span = timedelta(seconds=forward.CONNECT_S)
    client_timeout: Span = timedelta(seconds=forward.CLIENT_S)
    limits_path: Annotated[str, AfterValidator(_path)] | None = "/v1/limits"
    health_path: Annotated[str, AfterValidator(_path)] = "/-/health"
    headers: HeadersTable = HeadersTable()
    oauth: OAuthTable | None = None
    lease: LeaseTable | None = None
    routes: tuple[RouteTable, ...] = Field(strict=False, min_length=1)
    folder: Path = Field(default=Path(), exclude=True)

    @model_validator(mode="after")
    def _somebody(self) -> Self:
        if not self.keys and self.oauth is None:
            raise ValueError("nobody can be let in; leave keys at true, or write [oauth]")
        return self


def read_config(file: Path, *, upstream: str | None = None) -> GatewayConfig:
    """Reads and judges a configuration.

    Arguments:
        file: the TOML file.
        upstream: an origin in place of the file's.

    Errors: `ConfigError` that names the file, the line, what is wrong there, and what to write.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"{file}: {reason}; give the gateway's TOML file") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _AT.search(str(error))
        line = int(found[1]) if found else len(text.splitlines())
        raise ConfigError(f"{file}:{line}: {_AT.sub('', str(error))}; correct the TOML there") from None
    if upstream is not None:
        document["upstream"] = upstream
    try:
        config = GatewayConfig.model_validate({**document, "folder": file.parent.absolute()})
    except ValidationError as error:
        raise ConfigError(_told(file, text, error)) from None
    _must_fit(file, text, config)
    return config


def _must_fit(file: Path, text: str, config: GatewayConfig) -> None:
    """Lets the metering judge the routes one after the other, so that its complaint gets a line, too."""
    known: list[Route] = []
    for number, table in enumerate(config.routes):
        try:
            known.append(_one_more(known, table.route()))
        except ConfigError as error:
            raise ConfigError(f"{file}:{line_of(text, ('routes', number))}: {error}") from None


def _one_more(known: Sequence[Route], route: Route) -> Route:
    if any(route.name == other.name for other in known):
        raise ConfigError(f'the name "{route.name}" stands there twice; name each route by its own')
    Policy(routes=(*known, route))
    return route


def _told(file: Path, text: str, error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    place = tuple(first["loc"])
    name = ".".join(str(part) for part in place if isinstance(part, str)) or "the file"
    message = first["msg"].removeprefix("Value error, ")
    match first["type"]:
        case "missing":
            message = "it is missing; write it"
        case "extra_forbidden":
            message = "nothing has this name here; leave it out, or look how it is written"
        case "value_error":
            pass
        case _:
            message = f"{_shown(first['input'])}: {message[:1].lower()}{message[1:]}"
    return f"{file}:{line_of(text, place)}: {name}: {message}"
