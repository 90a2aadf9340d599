"""`quota pool …`: the quotas of model providers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from quota.calls import EnsureSubject, SetLimit
from quota.cli.help import Ordered, examples
from quota.cli.params import UNLIMITED, text_of
from quota.cli.screen import number
from quota.cli.store import Session, with_store
from quota.client import Do
from quota.costs.pools import Pool, PoolLimit, read_service_quotas

__all__ = ["pool"]

_IMPORT_S = 300


@click.group(cls=Ordered)
def pool() -> None:
    """Pools: what a provider's account may use of a model.

    A pool is a subject, pool:ACCOUNT/REGION/MODEL/ENDPOINT, that calls name beside their spender.
    """


@pool.command(
    "import",
    epilog=examples(
        "aws service-quotas list-service-quotas --service-code bedrock > quotas.json",
        "quota pool import quotas.json --model 'opus 4.8'",
        "quota pool import quotas.json --account aws-1 --region us-east-1 --dry-run",
    ),
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--model", help="Only models with this in their name.")
@click.option("--account", help="What to call the account. [default: its number]")
@click.option("--region", help="The region. [default: as the quotas say]")
@click.option("--dry-run", is_flag=True, help="Show, and change nothing.")
@with_store
def pool_import(
    session: Session, file: Path, model: str | None, account: str | None, region: str | None, dry_run: bool
) -> None:
    """Make pools of the JSON of `aws service-quotas list-service-quotas`, or bring them up to date; usage stays.

    Requests and tokens per minute are buckets, tokens per day a day in UTC: TPM x 1440 where the account has no value
    of its own. Quotas that it does not have are declared unlimited, and counted. All pools are made, or none.
    """
    found = read_service_quotas(text_of(file), account=account, region=region, model=model)
    if not dry_run:
        session.client.transact(lambda do: _set(do, found.pools, session.tenant), timeout_s=_IMPORT_S)
    rows = [
        {"subject": one.subject, **{name: getattr(limit, name) for name in PoolLimit.__slots__}}
        for one in found.pools
        for limit in one.limits
    ]
    limits = [limit for one in found.pools for limit in one.limits]
    columns = {
        "pool": [str(row["subject"]) for row in rows],
        "limit": [limit.name for limit in limits],
        "unit": [limit.unit for limit in limits],
        "capacity": [number(limit.capacity, UNLIMITED) + ("" if limit.declared else " *") for limit in limits],
        "per": [limit.period or "minute" for limit in limits],
    }
    session.screen.rows(rows, columns, "no quota of a model's requests or tokens in it")
    if not all(limit.declared for limit in limits):
        session.screen.line("* not in the file: TPM x 1440, or unlimited")


def _set(do: Do, pools: Iterable[Pool], tenant: str) -> None:
    for one in pools:
        do(EnsureSubject(one.subject, None, tenant))
        for limit in one.limits:
            numbers = (limit.unit, limit.kind, limit.capacity, limit.refill_per_s, limit.period)
            do(SetLimit(one.subject, limit.name, *numbers, tenant=tenant))
