"""Secrets of keys and tokens: how they are made, written, read and compared. They are shown once and stored nowhere.

A secret is written `qk_<id>_<random>` (a key) or `qt_<id>_<random>` (a token): its kind, its public id, and 256 random
bits in base64url. What is stored is the SHA-256 of the whole text: with so many bits there is nothing to guess, and
nothing that a slow hash would protect.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

__all__ = ["KEY", "TOKEN", "Credential", "hash_of", "new_id", "read"]

KEY = "qk"
TOKEN = "qt"  # noqa: S105 - a kind, no secret

_ID_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # nothing that is read as something else
_ID_LENGTH = 16
_WRITTEN = re.compile(r"(qk|qt)_([a-z0-9][a-z0-9-]{0,62})_([A-Za-z0-9_-]{43})", re.ASCII)
_LONGEST = 3 + 63 + 1 + 43


@dataclass(frozen=True, slots=True)
class Credential:
    """A secret as it was presented or made.

    Fields:
        kind: `KEY` or `TOKEN`.
        id: its public id.
        secret: the whole text; never shown by `repr`.
    """

    kind: str
    id: str
    secret: str

    def __repr__(self) -> str:
        """The public part only."""
        return f"Credential({self.kind}_{self.id}_***)"

    @property
    def hash(self) -> bytes:
        """What may be stored: the SHA-256 of the whole text."""
        return hash_of(self.secret)

    @classmethod
    def new(cls, kind: str, id: str | None = None) -> Credential:  # noqa: A002 - the contract's word
        """Makes a secret. `id`: its public id, None: a new one."""
        public = new_id() if id is None else id
        return cls(kind, public, f"{kind}_{public}_{secrets.token_urlsafe(32)}")


def new_id() -> str:
    """Returns a new public id: 80 random bits, so that two never meet."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))


def hash_of(secret: str) -> bytes:
    """Returns the SHA-256 of a secret's text, 32 bytes."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def read(text: str, kind: str) -> Credential | None:
    """Reads a presented secret; None when it cannot be one of this kind, whatever it is instead."""
    if len(text) > _LONGEST:
        return None
    found = _WRITTEN.fullmatch(text)
    return None if found is None or found[1] != kind else Credential(kind, found[2], text)
