"""A query API in FastAPI, as somebody would write it: unchanged but for the cost that it reports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from quota.http.cost_header import set_cost

app = FastAPI()


@app.get("/v1/rows/{table}")
async def rows(table: str, response: Response, limit: int = 300) -> Any:
    """A page of rows."""
    page = [{"id": number, "table": table} for number in range(min(limit, 300))]
    set_cost(response, len(page))
    return {"total": 10_000, "rows": page}


@app.post("/v1/current")
async def current(ids: list[str], response: Response) -> Any:
    """Current values: ids in the body, one call to a data node."""
    set_cost(response, len(ids), 1)
    return {"rows": ids}


@app.get("/v1/flow")
async def flow() -> Any:
    """An answer that flows; its cost comes with its head."""

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(40):
            yield f"{number}\n".encode()

    response = StreamingResponse(pieces())
    set_cost(response, 40)
    return response


@app.get("/v1/silent")
async def silent() -> Any:
    """Forgets to say what it cost."""
    return {"rows": ["row"] * 100}


@app.get("/v1/who")
async def who(request: Request, response: Response) -> Any:
    """Who the gateway says is asking."""
    set_cost(response, 0)
    return {"rows": [], "subject": request.headers.get("x-quota-subject")}


@app.get("/v1/broken")
async def broken() -> Any:
    """An exception."""
    raise RuntimeError("on purpose")
