"""What is metered how: routes with their estimates, and what happens when something goes wrong.

Policy(routes=(
    Route("/v1/series", estimate=through_nodes(page_limit(300), calls=3)),
    Route("/v1/values/<path:rest>", estimate=id_count("ids"), minimum_charge=1),
    Route("/healthz", metered=False),
))
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from typing import Literal, get_args

from werkzeug.exceptions import HTTPException
from werkzeug.routing import Map, MapAdapter, Rule

from quota.config import ConfigError
from quota.costs.rows import Estimator, Request, page_limit
from quota.http.headers import STYLES, Style
from quota.metering.identity import Authenticator
from quota.metering.leasing import Leasing

__all__ = ["Bound", "FailOpen", "Policy", "Route"]

Bound = Callable[[Request], None]
"""Refuses a request before anything is held: it raises the `Problem` that is answered."""

OnTimeout = Literal["charge", "hold"]
Overrun = Literal["book", "cap"]

_AMOUNT_MAX = 10**18

# How many paths a policy remembers the route of, and of which length at most.
_PATHS_REMEMBERED = 4096
_PATH_REMEMBERED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class FailOpen:
    """How much passes while the ledger is away: a bucket in the memory of each process, in units of the route's cost.

    Fields:
        capacity: what may pass at once.
        refill_per_s: what may pass in the long run.
    """

    capacity: int
    refill_per_s: int

    def __post_init__(self) -> None:
        if self.capacity < 1 or self.refill_per_s < 0:
            raise ConfigError(
                f"fail_open: {self} lets nothing pass; give a capacity above 0 and a refill of at least 0"
            )


@dataclass(frozen=True)
class Route:
    """How the requests of one kind are metered.

    Fields:
        path: a pattern as in Flask: `/v1/series/<id>`, `/files/<path:rest>`.
        methods: in capitals; none: all of them.
        name: how logs and reports call it; by default method and path.
        metered: False lets requests pass, unauthenticated and free.
        estimate: what is held before the work, in `unit`; at least 1, at most what the caller's bucket can ever hold.
        unit: what is counted. Requests and concurrency count beside it wherever a limit counts them.
        bounds: further refusals, before anything is held.
        minimum_charge: the least that a call is settled at, empty and failed ones too.
        failure_charge: what a call that failed is settled at when nobody says what it cost.
        on_timeout: what one that ran out of time is settled at: `charge` is the `failure_charge`, `hold` the estimate.
        overrun: what becomes of a cost above the estimate: `book` takes it all, `cap` ends at the estimate.
        fail_open: what passes while the ledger is away; None: nothing.
        headroom: share of every capacity to leave to others.
        leased: False has each of its calls decided and kept by the ledger, whatever the policy leases.
        ttl: how long a hold lives whose process died; longer than an answer takes to begin. It is prolonged while an
            answer flows.
    """

    path: str
    methods: tuple[str, ...] = ()
    name: str = ""
    metered: bool = field(default=True, kw_only=True)
    estimate: Estimator = field(default_factory=page_limit, kw_only=True)
    unit: str = field(default="cost", kw_only=True)
    bounds: tuple[Bound, ...] = field(default=(), kw_only=True)
    minimum_charge: int = field(default=0, kw_only=True)
    failure_charge: int = field(default=1, kw_only=True)
    on_timeout: OnTimeout = field(default="charge", kw_only=True)
    overrun: Overrun = field(default="book", kw_only=True)
    fail_open: FailOpen | None = field(default=None, kw_only=True)
    headroom: Decimal = field(default=Decimal(0), kw_only=True)
    leased: bool = field(default=True, kw_only=True)
    ttl: timedelta = field(default=timedelta(minutes=10), kw_only=True)

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ConfigError(f'route "{self.path}": a path begins with /')
        for method in self.methods:
            if not (method.isascii() and method.isalpha() and method.isupper()):
                raise ConfigError(f'route "{self.path}": method "{method}"; write methods in capitals, such as GET')
        for name in ("minimum_charge", "failure_charge"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _AMOUNT_MAX:
                raise ConfigError(f'route "{self.path}": {name} {value!r}; give a whole number, at least 0')
        for name, words in (("on_timeout", get_args(OnTimeout)), ("overrun", get_args(Overrun))):
            if getattr(self, name) not in words:
                raise ConfigError(f'route "{self.path}": {name} "{getattr(self, name)}"; write {" or ".join(words)}')
        if self.ttl <= timedelta(0):
            raise ConfigError(f'route "{self.path}": ttl {self.ttl}; give more than 0')
        if not 0 <= self.headroom < 1:
            raise ConfigError(f'route "{self.path}": headroom {self.headroom}; give 0 to below 1')
        if not self.name:
            object.__setattr__(self, "name", " ".join(filter(None, ("|".join(self.methods), self.path))))


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Everything that a gateway is told.

    Fields:
        routes: the most particular pattern that fits a request counts, wherever it stands.
        default: for what no route fits; None: 404. A page of rows, unless you say otherwise.
        authenticate: finds out who asks; None: API keys.
        headers: the style of the answers' headers.
        limits_path: where a caller finds its own limits, without spending; None: nowhere.
        show_cost: leave what the application reports in the answer.
        subject_header: which header tells the application who asks. A caller's own is dropped, whatever it says.
        drop_headers: further headers of requests that are dropped, such as identities that another proxy sets.
        lease: what is decided from memory, for whom; None: nothing.
    """

    routes: tuple[Route, ...] = ()
    default: Route | None = Route("/<path:rest>", name="default")
    authenticate: Authenticator | None = None
    headers: Style = "draft-11"
    limits_path: str | None = "/v1/limits"
    show_cost: bool = False
    subject_header: str | None = "x-quota-subject"
    drop_headers: tuple[str, ...] = ()
    lease: Leasing | None = None
    _paths: MapAdapter = field(init=False, repr=False, compare=False)
    _known: Callable[[str, str], Route | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.headers not in STYLES:
            raise ConfigError(f'headers "{self.headers}"; write {", ".join(STYLES)}')
        seen: set[tuple[str, str]] = set()
        for route in self.routes:
            for method in route.methods or ("any",):
                if (route.path, method) in seen:
                    raise ConfigError(f'route "{route.path}" stands there twice for the method {method}')
                seen.add((route.path, method))
        paths = Map(strict_slashes=False, merge_slashes=False)
        for route in self.routes:
            try:
                paths.add(Rule(route.path, methods=route.methods or None, endpoint=route))
            except (ValueError, LookupError) as error:
                raise ConfigError(f'route "{route.path}": {error}; write it as in Flask: /v1/series/<id>') from error
        paths.update()
        object.__setattr__(self, "_paths", paths.bind(""))
        object.__setattr__(self, "_known", functools.lru_cache(_PATHS_REMEMBERED)(self._matched))

    def route_of(self, method: str, path: str) -> Route | None:
        """Returns how a request is metered; None when it is not known here. HEAD is as GET."""
        # Matching takes longer than all the rest of it, and most paths are asked for again.
        return self._known(method, path) if len(path) <= _PATH_REMEMBERED else self._matched(method, path)

    def leases(self, route: Route) -> bool:
        """True when calls of a route may be decided out of a lease."""
        lease = self.lease
        if lease is None or not route.leased or not route.metered:
            return False
        return route.unit == lease.unit and route.headroom <= lease.leaves

    def _matched(self, method: str, path: str) -> Route | None:
        try:
            found: Route = self._paths.match(path, method=method)[0]
        except HTTPException:
            return self.default
        return found
