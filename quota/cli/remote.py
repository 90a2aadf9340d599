"""The HTTP API as commands use it, when QUOTA_API_URL names one: no database login is needed on this machine."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from quota.config import ConfigError
from quota.errors import Misuse, NotAllowed, QuotaError, Unavailable, misuse_named
from quota.http.values import written

__all__ = ["Remote"]

_TIMEOUT_S = 30
_AWAY = frozenset({429, 502, 503, 504})


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A token goes to the address that was named, and nowhere else."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follows none."""


_opener = urllib.request.build_opener(_NoRedirect)


@dataclass(frozen=True, repr=False)
class Remote:
    """An API somewhere, and the token to speak to it with.

    Fields:
        url: its address, such as https://quota.example.
        token: the token; from QUOTA_API_TOKEN, never from the command line, which others can see.
        tenant: which tenant; None: the token's own, else `default`.
    """

    url: str
    token: str
    tenant: str | None

    @classmethod
    def from_env(cls, tenant: str | None) -> Remote | None:
        """Returns the API that the environment names; None where it names none. Errors: `ConfigError`."""
        url = os.environ.get("QUOTA_API_URL", "").strip()
        if not url:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ConfigError(f'QUOTA_API_URL: "{parts._replace(netloc=parts.hostname or "").geturl()}" is no address'
                              "; write https://host or http://127.0.0.1:8080")  # fmt: skip
        token = os.environ.get("QUOTA_API_TOKEN", "").strip()
        if not token:
            raise ConfigError("QUOTA_API_TOKEN is not set; give the token that speaks to QUOTA_API_URL")
        return cls(url.rstrip("/"), token, tenant or os.environ.get("QUOTA_TENANT", "").strip() or None)

    def call(self, method: str, path: str, body: object | None = None) -> Any:
        """Makes a request; returns the JSON of its answer.

        Errors: the `Misuse` that the problem names, `NotAllowed` for 401 and 403, `Unavailable`.
        """
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json"}
        if self.tenant is not None:
            headers["Quota-Tenant"] = self.tenant.encode().decode("latin-1")
        data = None
        if body is not None:
            data = written(body).encode()
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(f"{self.url}/v1{path}", data, headers, method=method)  # noqa: S310 - checked
        try:
            with _opener.open(request, timeout=_TIMEOUT_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise _problem(error) from None
        except (OSError, ValueError) as error:
            raise Unavailable(f"{self.url}: {getattr(error, 'reason', error)}", in_doubt=method != "GET") from None

    def every(self, path: str, **query: str | None) -> Iterator[dict[str, Any]]:
        """Yields all items of a list, page by page."""
        given = {name: value for name, value in query.items() if value is not None}
        after: str | None = None
        while True:
            answer = self.call(
                "GET", f"{path}?{urlencode({**given, **({'after': after} if after else {})})}".rstrip("?")
            )
            yield from answer["items"]
            after = answer.get("next")
            if after is None:
                return


def _problem(error: urllib.error.HTTPError) -> QuotaError:
    try:
        found = json.load(error)
        name, detail = str(found["type"]).rpartition(":")[2], str(found["detail"])
    except (ValueError, KeyError, TypeError):
        return Unavailable(f"the API answered {error.code} and no problem document; is QUOTA_API_URL the API's?")
    if error.code in (401, 403):
        return NotAllowed(detail)
    if error.code in _AWAY or error.code >= 500:
        return Unavailable(detail)
    known: Misuse = misuse_named(name, detail)
    return known
