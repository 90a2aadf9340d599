"""What the URL map says: every route with its access, and a request of each that would be good if it were let in."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from flask_openapi3 import OpenAPI

from quota.admin import create_app
from quota.admin.access import Access
from quota.admin.document import document
from quota.client import Client


@functools.cache
def application() -> OpenAPI:
    """An application that is asked for its routes only."""
    app = create_app(client=Client("postgresql://nobody@127.0.0.1:1/none"))
    assert isinstance(app, OpenAPI)
    return app


@functools.cache
def openapi() -> dict[str, Any]:
    """Its document."""
    return document(application())


@dataclass(frozen=True)
class Route:
    """One method of one path."""

    method: str
    rule: str
    endpoint: str
    access: Access | None

    @property
    def operation(self) -> dict[str, Any]:
        """Its part of the document."""
        path = self.rule.replace("<segment:", "{").replace(">", "}")
        found: dict[str, Any] = openapi()["paths"][path][self.method.lower()]
        return found

    def path(self, **other: str) -> str:
        """Its path with the examples of the document in it, or with what is given in their place."""
        text = self.rule
        for parameter in self.operation.get("parameters", []):
            if parameter["in"] == "path":
                value = other.get(parameter["name"], parameter.get("example"))
                assert value is not None, f"{self.endpoint}: {parameter['name']} has no example"
                text = text.replace(f"<segment:{parameter['name']}>", quote(value, safe=":"))
        return text.removeprefix("/v1")

    @property
    def body(self) -> Any:
        """The example of its body; None when it takes none."""
        taken = self.operation.get("requestBody")
        if taken is None:
            return None
        media = taken["content"]["application/json"]
        assert "example" in media, f"{self.endpoint} takes a body and has no example"
        return media["example"]


def all_routes() -> list[Route]:
    """Every route of the application, those of no API included."""
    app = application()
    return [
        Route(method, rule.rule, rule.endpoint, getattr(app.view_functions[rule.endpoint], "access", None))
        for rule in app.url_map.iter_rules()
        for method in sorted((rule.methods or set()) - {"HEAD", "OPTIONS"})
    ]


def api_routes() -> list[Route]:
    """Every route that takes a token."""
    return [route for route in all_routes() if route.access is not None and not route.access.public]
