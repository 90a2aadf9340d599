"""The admin API: keys, tiers, caps, over HTTP, for people who operate it. `create_app()` is a Flask application.

| module | what |
|---|---|
| `app` | puts it together: limits of what comes in, errors, headers |
| `access`, `changes`, `pages` | who may call; how a write is done; how lists are walked |
| `front` | what every request and every answer has: an id, headers, a line in the log |
| `routes`, `types`, `paths` | how routes and types are declared; slashes in names |
| `keys`, `tiers`, `limits`, `subjects`, `reservations`, `books`, `tenants`, `tokens`, `health` | the nouns |
| `document` | the OpenAPI document, and the page that shows it |
| `serving` | gunicorn's configuration |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quota.admin.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    """Imports the application when it is asked for: who only reads `serving` need not wait for it."""
    if name != "create_app":
        raise AttributeError(name)
    from quota.admin.app import create_app

    return create_app
