"""The gateway: a reverse proxy in front of a query API. It holds what a call may cost, forwards it, settles the truth.

    front -> metering (quota.integrations.asgi) -> forward

| module | what it holds |
|---|---|
| `front` | what comes first: malformed requests, health, the life of the process |
| `hygiene` | what is malformed, and which headers go where |
| `forward` | the way to the upstream and back |
| `bounds` | bounds beside cost |
| `oauth`, `jwks` | access tokens, and the issuer's keys |
| `config` | `gateway.toml` |
| `serving`, `worker` | the server's configuration, and its worker |
| `sample` | a query API to try it with |
"""

from __future__ import annotations

from pathlib import Path

from quota.client import AsyncClient
from quota.config import Settings
from quota.gateway.config import GatewayConfig, OAuthTable, read_config
from quota.gateway.forward import Forwarder
from quota.gateway.front import Gateway
from quota.gateway.hygiene import CREDENTIALS
from quota.gateway.jwks import KeySet
from quota.gateway.oauth import KeysOrTokens, Tokens
from quota.integrations.asgi import MeteringMiddleware
from quota.metering import Authenticator, Keys, Policy

__all__ = ["Gateway", "GatewayConfig", "create_gateway", "read_config"]


def create_gateway(config: GatewayConfig, settings: Settings, *, coalesce: bool = True) -> Gateway:
    """Makes the gateway of one process. It opens no connection before its first request.

    Arguments: `config`, of `read_config`; `settings`, of the environment: which ledger; `coalesce`: gather concurrent
    calls of the ledger into batches.
    Errors: `ConfigError` for what cannot be.
    """
    options = AsyncClient.settings_of(settings) | {"fail_open": False}
    client = AsyncClient(**options, coalesce=coalesce, application_name="quota gateway")
    policy = Policy(
        routes=tuple(table.route() for table in config.routes),
        default=None,
        authenticate=_authenticator(config, client),
        headers=config.headers.style,
        limits_path=config.limits_path,
        show_cost=config.headers.show_cost,
        subject_header=config.headers.subject,
        lease=None if config.lease is None else config.lease.leasing(),
    )
    forwarder = Forwarder(
        config.upstream,
        bounds={table.route().name: table.limits() for table in config.routes},
        withheld=() if config.headers.pass_credentials else CREDENTIALS,
        connect_s=config.connect_timeout.total_seconds(),
        client_s=config.client_timeout.total_seconds(),
    )
    return Gateway(
        forwarder,
        MeteringMiddleware(forwarder, client, policy),
        client,
        spoofed=frozenset(name.encode("ascii") for name in config.headers.drop),
        health_path=config.health_path,
    )


def _authenticator(config: GatewayConfig, client: AsyncClient) -> Authenticator:
    keys = Keys(client)
    if config.oauth is None:
        return keys
    tokens = _tokens(config.oauth, config.folder)
    return KeysOrTokens(keys, tokens) if config.keys else tokens


def _tokens(table: OAuthTable, folder: Path) -> Tokens:
    # A relative file is one beside the configuration.
    source = table.jwks_url or (folder / str(table.jwks_file))
    return Tokens(
        KeySet(source),
        issuer=table.issuer,
        audience=table.audience,
        algorithms=table.algorithms,
        leeway_s=table.leeway.total_seconds(),
        connection_claim=table.connection_claim,
        user_claim=table.user_claim,
    )
