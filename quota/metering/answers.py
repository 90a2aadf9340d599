"""What is answered in the application's place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from quota.calls import LimitState, Reservation
from quota.http import headers as limit_headers
from quota.http.problems import CONTENT_TYPE, Problem, of_refusal
from quota.http.values import written

__all__ = ["Answer", "of_limits", "of_problem", "refused"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: `status`, `headers` (with their `Content-Length`) and `body`."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def _whole(status: int, content_type: str, text: str, headers: Iterable[tuple[str, str]]) -> Answer:
    body = text.encode("utf-8")
    return Answer(status, [("Content-Type", content_type), ("Content-Length", str(len(body))), *headers], body)


def of_problem(problem: Problem, headers: Iterable[tuple[str, str]] = ()) -> Answer:
    """Returns the answer that a problem is, with further headers."""
    return _whole(problem.status, CONTENT_TYPE, written(problem.document()), [*problem.headers.items(), *headers])


def refused(
    refusal: Reservation, states: Sequence[LimitState], subject: str, style: limit_headers.Style
) -> tuple[Problem, list[tuple[str, str]]]:
    """Returns the problem of a refusal and its headers: `RateLimit` where waiting helps, and never about money.

    Arguments:
        refusal: the answer.
        states: the limits on the subject's lineage, for their terms.
        subject: who asked. Ancestors are named by their kind: who they are is not the caller's business.
        style: of the headers.
    """
    money = {state.unit for state in states if state.money}
    hidden = refusal
    if refusal.limit_subject not in (None, subject):
        hidden = replace(refusal, limit_subject=str(refusal.limit_subject).partition(":")[0])
    problem = of_refusal(hidden, subject, money.__contains__)
    if problem.status != 429:
        return problem, []
    policies, violated = limit_headers.of_refusal(refusal, states, subject)
    return problem, [
        *limit_headers.rate_limit_headers(policies, style, violated),
        *limit_headers.full_after(policies),
    ]


def of_limits(subject: str, states: Sequence[LimitState], headers: Iterable[tuple[str, str]]) -> Answer:
    """Returns a caller's own limits, balances and windows. Of its ancestors, what is counted, not who they are."""
    shown = [
        {
            "owner": state.owner if state.owner == subject else state.owner.partition(":")[0],
            "name": state.limit_name,
            **{
                name: getattr(state, name)
                for name in (
                    "unit", "kind", "capacity", "refill_per_s", "period", "spent", "reserved", "level", "available",
                    "window_start", "window_end", "resets_in_s", "full_after_s",
                )
            },
        }
        for state in states
        if state.owner == subject or not state.money
    ]  # fmt: skip
    text = written({"subject": subject, "limits": shown})
    return _whole(200, "application/json", text, [("Cache-Control", "no-store"), *headers])
