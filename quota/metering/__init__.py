"""Metering of a query API: who asks, what it may cost, a hold before the work, the true cost after it, honest headers.

    authenticate -> estimate -> reserve -> the application -> settle at what it reports -> headers

| module | what it holds |
|---|---|
| `policy` | `Policy` and `Route`: which request is estimated how, and what happens when something goes wrong |
| `identity` | `Identity`, and how a request says whose it is; `Keys` for API keys |
| `call` | `Meter` and `Call`: one request from its arrival to its settlement, as plans, without I/O |
| `books`, `leasing` | where a call is held and settled: at the ledger, or out of a lease |
| `answers` | what is answered in the application's place: refusals, errors, a key's own limits |
| `ceiling` | what passes while the ledger is away |

The middleware (`quota.integrations.asgi`, `quota.integrations.wsgi`) carries the plans out with the client it has.
"""

from quota.costs.rows import Request, fixed, id_count, minimum, page_limit, row_cost, through_nodes
from quota.metering.answers import Answer
from quota.metering.call import Call, Meter
from quota.metering.identity import Authenticator, Identity, Keys, credential_of
from quota.metering.leasing import Leasing
from quota.metering.policy import Bound, FailOpen, Policy, Route

__all__ = [
    "Answer",
    "Authenticator",
    "Bound",
    "Call",
    "FailOpen",
    "Identity",
    "Keys",
    "Leasing",
    "Meter",
    "Policy",
    "Request",
    "Route",
    "credential_of",
    "fixed",
    "id_count",
    "minimum",
    "page_limit",
    "row_cost",
    "through_nodes",
]
