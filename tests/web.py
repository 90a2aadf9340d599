"""What came back over HTTP, for tests that ask a real server."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        """The JSON document."""
        return json.loads(self.body)

    @property
    def problem(self) -> str:
        """The name of the problem that it is."""
        assert self.headers["Content-Type"] == "application/problem+json", (self.status, self.body)
        found = self.json
        assert found["status"] == self.status
        assert {"type", "title", "status", "detail"} <= found.keys()
        return str(found["type"]).rpartition(":")[2]
