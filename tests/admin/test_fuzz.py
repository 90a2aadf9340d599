"""schemathesis makes requests from the document, good and bad ones: no 5xx, and answers that are as documented."""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.admin.conftest import Api, Server, new_api
from tests.admin.routes import openapi
from tests.server import Connection

CHECKS: list[CheckFunction] = [
    schemathesis.checks.not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]

schema = schemathesis.openapi.from_dict(openapi())


@pytest.fixture(scope="module")
def victim(server: Server, db: Connection) -> Api:
    """A tenant that takes it all, with something in it."""
    api = new_api(server, db)
    api.do("POST", "/subjects", {"name": "org:acme"})
    api.do("POST", "/keys", {"name": "Web", "id": "web", "parent": "org:acme"})
    api.do("PUT", "/limits/org:acme/cap", {"unit": "usd", "capacity": "10"})
    return api


@schema.parametrize()
@settings(
    max_examples=int(os.environ.get("QUOTA_FUZZ_EXAMPLES", "5")),
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_nothing_breaks_it(case: Any, victim: Api) -> None:
    roles = case.operation.definition.raw["x-roles"]
    # A token that may, and that the checks do not take away: who may is tested elsewhere.
    role = roles[-1] if roles != ["everybody"] else "viewer"
    case.headers = {
        **{name: value for name, value in (case.headers or {}).items() if name.lower() != "quota-tenant"},
        "Authorization": f"Bearer {victim.tokens[role]}",
    }
    response = case.call(base_url=f"http://127.0.0.1:{victim.server.port}", timeout=30)
    if response.status_code == 414:
        return  # a line longer than gunicorn reads: its own answer, before the application
    case.validate_response(response, checks=CHECKS)
