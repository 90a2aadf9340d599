"""The engine, in the order in which it is read and installed: one family of functions a file.

``types``, ``batch_types`` and ``clock`` come first, then what callers send (``errors``, ``units``), the arithmetic of
one account (``limits``), how an answer is put together (``answers``) and which definition is in force (``bind``). Then
the life of a reservation (``reserve``, ``reap``, ``settle``, ``adjust``, ``record``), and many at once (``alike``,
``reserve_many``, ``settle_many``). Then what is read (``balance``, ``limits_of``, ``check``, ``views``), what
operators do (``tenants``, ``subjects``, ``definitions``, ``tiers``, ``keys``, ``tokens``, ``operators``, ``retain``),
what models cost (``price_types``, ``prices``), runs (``run_types``, ``runs``), waiting in turn (``turn_types``,
``turns``), what calls have told (``reports``) and who may do it (``append_only``, ``grants``).

The files are the current truth. What a database runs was installed by a migration from a frozen copy of them
(``migrations/sql/``); a test holds the newest copies to these files, byte for byte.
"""

from __future__ import annotations

from pathlib import Path

FILES = (
    "types",
    "batch_types",
    "clock",
    "errors",
    "units",
    "limits",
    "answers",
    "bind",
    "reserve",
    "reap",
    "settle",
    "adjust",
    "record",
    "alike",
    "reserve_many",
    "settle_many",
    "balance",
    "limits_of",
    "check",
    "tenants",
    "subjects",
    "definitions",
    "tiers",
    "keys",
    "tokens",
    "operators",
    "retain",
    "views",
    "price_types",
    "prices",
    "run_types",
    "runs",
    "turn_types",
    "turns",
    "reports",
    "append_only",
    "grants",
)


def text(name: str) -> str:
    """The SQL of one file of the engine.

    Arguments: ``name``, one of ``FILES``. Result: its text. Errors: ``FileNotFoundError`` for another name.
    """
    return (Path(__file__).parent / f"{name}.sql").read_text(encoding="utf-8")
