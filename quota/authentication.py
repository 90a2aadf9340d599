"""Who presents this secret? Answers are remembered for a bounded time, within which revocations reach everybody.

    who = Authenticator(client).authenticate(secret)  # a KeyHolder, or None
    if who is None or not who.active: ...              # 401
    client.reserve(who.subject, ...)                   # decided by the database, never by what is remembered

Only the answer to "who is it" is remembered. What may be spent is decided by the ledger, every time; and a revoked
key's subject is frozen, so that its holds are refused at once.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from quota import credentials
from quota.calls import KeyHolder, VerifyKey
from quota.client import Client
from quota.client.attempts import Plan
from quota.client.core import Core
from quota.config import ConfigError
from quota.credentials import Credential
from quota.errors import Unavailable

__all__ = ["Authenticator", "Remembered"]

V = TypeVar("V")

CACHE_S = 10.0
_MOST = 10_000


class Remembered(Generic[V]):
    """A bounded memory: every value is forgotten `seconds` after the question was asked, the least used ones first.

    Arguments:
        seconds: how long; 0 remembers nothing.
        most: how many values.
    """

    def __init__(self, seconds: float, most: int = _MOST) -> None:
        if not 0 <= seconds <= 3600:
            raise ConfigError(f"cache_s: {seconds} is not 0 to 3600; give seconds, such as 10")
        self.seconds = seconds
        self._most = most
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, tuple[float, V]] = OrderedDict()

    def get(self, key: Hashable, ask: Callable[[], V | None]) -> V | None:
        """Returns what is remembered, else what `ask` answers; None is never remembered, so that a new key works."""
        known = self.find(key)
        if known is not None:
            return known
        # The bound runs from before the question: what changes while it is on its way is not kept any longer.
        asked_at_s = time.monotonic()
        value = ask()
        self.keep(key, value, asked_at_s)
        return value

    def find(self, key: Hashable, *, however_old: bool = False) -> V | None:
        """Returns what is remembered; `however_old`: also what is past its time, while there was room for it."""
        with self._lock:
            known = self._values.get(key)
            if known is None or not (however_old or time.monotonic() < known[0]):
                return None
            self._values.move_to_end(key)
            return known[1]

    def keep(self, key: Hashable, value: V | None, asked_at_s: float) -> None:
        """Remembers an answer to a question of `asked_at_s` (of `time.monotonic`); None forgets the one before."""
        with self._lock:
            if value is None or not self.seconds:
                self._values.pop(key, None)
            else:
                self._values[key] = (asked_at_s + self.seconds, value)
                self._values.move_to_end(key)
                while len(self._values) > self._most:
                    self._values.popitem(last=False)


class Authenticator:
    """Verifies the secrets of keys. Thread-safe; every process has a memory of its own.

    Arguments:
        client: the ledger; its login needs the role `quota_worker`, `quota_admin` or `quota_api`. For `authenticate`
            a `Client`; `authenticating` makes plans for either kind.
        cache_s: how long an answer is remembered, in seconds, at most an hour: within that time a revocation, an
            expiry, a rotation or another tier is seen everywhere. 0: not at all.
    """

    def __init__(self, client: Core, cache_s: float = CACHE_S) -> None:
        self._client = client
        self._known: Remembered[KeyHolder] = Remembered(cache_s)

    def authenticate(self, secret: str) -> KeyHolder | None:
        """Returns whose secret it is, None when nobody's; `active` says whether the holder may be let in.

        Errors: `Unavailable`: nobody is let in while the database is away, but whom the memory still knows.
        """
        if not isinstance(self._client, Client):
            raise TypeError("authenticate is for a Client; have an AsyncClient drive authenticating(secret)")
        return self._client.drive(self.authenticating(secret))

    def authenticating(self, secret: str, *, while_away: bool = False) -> Plan[KeyHolder | None]:
        """`authenticate` as a plan, for a client to drive.

        Arguments:
            while_away: while the database is away, let in whom the memory knew at any time, revoked since or not.
        """
        found = credentials.read(secret, credentials.KEY)
        return None if found is None else (yield from self.verifying(found, while_away=while_away))

    def verifying(self, key: Credential, *, while_away: bool = False) -> Plan[KeyHolder | None]:
        """`authenticating` of a key that has been read already (`quota.credentials.read`)."""
        digest = key.hash
        known = self._known.find(digest)
        if known is not None:
            return known
        asked_at_s = time.monotonic()
        try:
            holder = yield from self._client.plan(VerifyKey(key.id, digest))
        except Unavailable:
            known = self._known.find(digest, however_old=True) if while_away else None
            if known is None:
                raise
            return known
        self._known.keep(digest, holder, asked_at_s)
        return holder
