"""The reaper: closes the holds whose owners died. From cron one `sweep`, as a service `run`.

Books stay right without it and any number may run at once; it only brings holds back sooner than the next reserve that
meets them would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from quota.calls import Reap, Reaped
from quota.client import Client
from quota.errors import Unavailable

__all__ = ["run", "sweep"]

# Small: a budget that everybody shares is written once a batch, and whoever reserves of it waits so long.
_BATCH = 100


def sweep(client: Client, *, batch: int = _BATCH, tenant: str | None = None) -> Reaped:
    """Closes every hold that is overdue now.

    Arguments:
        client: the ledger.
        batch: most holds per transaction.
        tenant: whose; None: of all tenants.

    Result: how many holds were released and charged. Errors: those of `Client.reap`; the batches before it are done.
    """
    released = charged = 0
    while True:
        done = client.call(Reap(batch, tenant))
        released, charged = released + done.released, charged + done.charged
        if done.released + done.charged < batch:
            return Reaped(released=released, charged=charged)


def run(
    client: Client,
    every_s: float,
    stop: threading.Event,
    report: Callable[[Reaped | Unavailable], None],
    *,
    batch: int = _BATCH,
    tenant: str | None = None,
) -> None:
    """Sweeps until `stop` is set, which ends it after the sweep under way.

    Arguments:
        client: the ledger.
        every_s: pause between sweeps in seconds.
        stop: ends the loop; a pause is cut short.
        report: told of every sweep, and of a database that was away: the next sweep tries again.
        batch, tenant: as in `sweep`.
    """
    while not stop.is_set():
        try:
            report(sweep(client, batch=batch, tenant=tenant))
        except Unavailable as error:
            report(error)
        stop.wait(every_s)
