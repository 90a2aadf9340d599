"""What a query of rows costs: the formula, and what may be held before the answer is known.

    cost = ceil(rows x (100 + 20 x node_calls) / 100)

Rows are those returned, not those that would match. Node calls are calls, not distinct servers: one that fetches ten
series counts once, and one server asked three times counts three times. The 20 % a call are a policy, no measurement;
`quota report calibration` holds them against one.

An **estimate** is any callable from a `Request` to a number of units, at least 0. It is no validation: what makes no
sense is estimated as the most that there can be, and passed on to whoever refuses it.

    minimum(id_count("ids"), fixed(50))
    through_nodes(page_limit(300), calls=3)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import parse_qs

__all__ = [
    "NODE_CALL_PERCENT",
    "PAGE_MAX",
    "Estimator",
    "Fixed",
    "IdCount",
    "Minimum",
    "PageLimit",
    "Request",
    "ThroughNodes",
    "fixed",
    "id_count",
    "minimum",
    "page_limit",
    "row_cost",
    "through_nodes",
]

NODE_CALL_PERCENT = 20
PAGE_MAX = 300

# More parameters than anybody sends; counting them takes time.
_PARAMETERS_MAX = 1000


def row_cost(rows: int, node_calls: int = 0, percent: int = NODE_CALL_PERCENT) -> int:
    """Returns what an answer costs, in units of `cost`: `ceil(rows x (100 + percent x node_calls) / 100)`.

    Arguments:
        rows: rows in this answer (its page, not the total), at least 0.
        node_calls: calls to data nodes; a batch counts once; fewer than 0 count as 0.
        percent: what each of them adds, in percent of the rows; not compounded.

    Errors: `ValueError` for fewer than 0 rows or percent; `TypeError` for what is no whole number.
    """
    given: dict[str, object] = {"rows": rows, "node_calls": node_calls, "percent": percent}
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, not a whole number")
    if rows < 0 or percent < 0:
        raise ValueError(f"rows {rows} and percent {percent} are at least 0")
    return -(-rows * (100 + percent * max(0, node_calls)) // 100)


class Request:
    """What is known of a request before it is answered.

    Arguments:
        method: in capitals.
        path: decoded, without the query.
        query: the query as it was sent, without the question mark.
        headers: values by lower-case name, each as often as it was sent.
        target: the path as it was sent; None: not known.
    """

    def __init__(
        self, method: str, path: str, query: str, headers: Mapping[str, Sequence[str]], target: str | None = None
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.target = target

    @cached_property
    def parameters(self) -> Mapping[str, Sequence[str]]:
        """The values of the query by name. Of one that cannot be read, none: every estimate is then the most."""
        if "%" in self.query or "+" in self.query:
            try:
                return parse_qs(self.query, keep_blank_values=True, max_num_fields=_PARAMETERS_MAX)
            except ValueError:
                return {}
        # Nothing to decode: the same without looking for it, in a quarter of the time.
        pairs = self.query.split("&")
        found: dict[str, list[str]] = {}
        for pair in pairs if len(pairs) <= _PARAMETERS_MAX else ():
            if pair:
                name, _, value = pair.partition("=")
                found.setdefault(name, []).append(value)
        return found


Estimator = Callable[[Request], int]


def _one_to(most: int, text: str) -> int | None:
    """A whole number from 1 to `most` in decimal digits; None for anything else."""
    digits = text.lstrip("0")
    if not (text.isascii() and text.isdigit()) or not digits or len(digits) > len(str(most)):
        return None
    return int(digits) if int(digits) <= most else None


@dataclass(frozen=True, slots=True)
class PageLimit:
    """The rows that a page may have: the request's `limit`, or the most where that is absent, twofold or invalid."""

    most: int = PAGE_MAX
    parameter: str = "limit"

    def __call__(self, request: Request) -> int:
        """The estimate in rows."""
        match request.parameters.get(self.parameter, ()):
            case [text]:
                return _one_to(self.most, text) or self.most
            case _:
                return self.most


@dataclass(frozen=True, slots=True)
class IdCount:
    """How many ids are asked for: separated by commas, or the parameter several times; at most a page.

    Without the parameter, such as when ids stand in the body, which nobody reads here: a page.
    """

    parameter: str = "ids"
    most: int = PAGE_MAX

    def __call__(self, request: Request) -> int:
        """The estimate in rows."""
        given = request.parameters.get(self.parameter)
        if given is None:
            return self.most
        return min(self.most, sum(1 for text in given for one in text.split(",") if one.strip()))


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same for every request, such as 1 for a short list."""

    cost: int = 1

    def __call__(self, _request: Request) -> int:
        """The estimate."""
        return self.cost


class Minimum:
    """The least of several estimates.

    Arguments: `estimators`, one at least.
    """

    __slots__ = ("estimators",)

    def __init__(self, *estimators: Estimator) -> None:
        if not estimators:
            raise ValueError("minimum of nothing; give estimates")
        self.estimators = estimators

    def __call__(self, request: Request) -> int:
        """The estimate."""
        return min(estimate(request) for estimate in self.estimators)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Minimum) and self.estimators == other.estimators

    def __hash__(self) -> int:
        return hash(self.estimators)

    def __repr__(self) -> str:
        return f"minimum({', '.join(map(repr, self.estimators))})"


@dataclass(frozen=True, slots=True)
class ThroughNodes:
    """A conservative estimate: these rows, and as many calls to data nodes as there may be."""

    rows: Estimator
    calls: int
    percent: int = NODE_CALL_PERCENT

    def __call__(self, request: Request) -> int:
        """The estimate."""
        return row_cost(self.rows(request), self.calls, self.percent)


# As they are written in a policy.
page_limit = PageLimit
id_count = IdCount
fixed = Fixed
minimum = Minimum
through_nodes = ThroughNodes
