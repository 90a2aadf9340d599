"""How a route is declared: path, who may call it, what it answers, all in one place and all in the document."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from flask import current_app
from flask_openapi3 import APIBlueprint, Tag
from pydantic import BaseModel, ConfigDict, ValidationError

from quota.admin.access import Access
from quota.admin.types import Answer
from quota.http.values import path_of

__all__ = ["ProblemDocument", "blueprint", "place", "route"]

_PREFIX = "/v1"

F = TypeVar("F", bound=Callable[..., Any])


class ProblemDocument(Answer):
    """What went wrong (RFC 9457). Problems have members of their own beside these."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None


_PROBLEM = {
    "description": "A problem: what was wrong and what to do. Codes: see the description of the API.",
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}},
}


class _Blueprint(APIBlueprint):
    """The library's, which looks with every request for all that a route may take; most reads take a path only."""

    @staticmethod
    def create_view_func(  # type: ignore[override]  # options are passed on
        func: Any, header: Any, cookie: Any, path: Any, query: Any, form: Any, body: Any, raw: Any, **options: Any
    ) -> Any:
        """Returns what Flask calls for a route."""
        if path is None or any((header, cookie, query, form, body, raw)):
            return APIBlueprint.create_view_func(func, header, cookie, path, query, form, body, raw, **options)

        @functools.wraps(func)
        def view(**parts: str) -> Any:
            try:
                judged = path.model_validate(parts)
            except ValidationError as error:
                return current_app.validation_error_callback(error)  # type: ignore[attr-defined]
            return func(path=judged)

        return view


def blueprint(name: str, about: str) -> APIBlueprint:
    """Returns the blueprint of a noun. `about`: what it is, for the document."""
    return _Blueprint(name, __name__, abp_tags=[Tag(name=name.replace("_", " "), description=about)])


def place(*parts: str) -> str:
    """Returns where a resource is found: its path below the root of the service."""
    return _PREFIX + path_of(*parts)


def route(
    on: APIBlueprint,
    method: str,
    path: str,
    access: Access,
    *,
    ok: dict[int, type[BaseModel] | None],
    content: dict[str, Any] | None = None,
) -> Callable[[F], F]:
    """Declares a route.

    Arguments:
        on: the blueprint of its noun.
        method: get, post, put, patch or delete.
        path: below `/v1`.
        access: who may call it.
        ok: what it answers when it goes well: status to the type of the answer.
        content: media types in place of JSON.

    The function's docstring is the description, its arguments `path`, `query` and `body` are what it takes.
    """

    def declare(function: F) -> F:
        function.access = access  # type: ignore[attr-defined]
        responses: dict[str, Any] = {str(status): kind for status, kind in ok.items()}
        if content is not None:
            responses = {str(status): {"description": "OK", "content": content} for status in ok}
        declared = getattr(on, method)(
            _PREFIX + path,
            operation_id=function.__name__,
            responses={**responses, "default": dict(_PROBLEM)},
            security=None if access.public else [{"token": []}],
            openapi_extensions={"x-roles": ["everybody"] if access.public else sorted(access.roles)},
        )
        declared(function)
        return function

    return declare
