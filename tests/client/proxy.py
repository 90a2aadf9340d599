"""A proxy on loopback between a client and a PostgreSQL server that can lose answers and stop answering."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict

_CHUNK = 65536


class Proxy:
    """Forwards between `url` and the server of another URL.

    Fields:
        url: leads through this proxy to the same database.
        lose_answers: how many of the next answers are lost: the server has worked, the connection breaks.
        frozen: while set, nothing is forwarded any more, and nothing is closed either.
    """

    def __init__(self, upstream: str) -> None:
        parts = {key: str(value) for key, value in conninfo_to_dict(upstream).items() if value is not None}
        self._host = parts.get("host", "localhost")
        self._port = int(parts.get("port", "5432"))
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self.lose_answers = 0
        self.frozen = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        login = quote(parts.get("user", ""), safe="")
        if "password" in parts:
            login += ":" + quote(parts["password"], safe="")
        port = self._listener.getsockname()[1]
        self.url = f"postgresql://{login}@127.0.0.1:{port}/{quote(parts['dbname'], safe='')}?sslmode=disable"

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Breaks every connection and takes no more."""
        # shutdown, not close alone: a thread that sits in accept() or recv() wakes up from it.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            self._break(each)

    @staticmethod
    def _start(target: object, *args: object) -> None:
        assert callable(target)
        threading.Thread(target=target, args=args, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = self._connect()
            with self._lock:
                self._sockets += [client, server]
            self._start(self._forward, client, server, False)
            self._start(self._forward, server, client, True)

    def _connect(self) -> socket.socket:
        if self._host.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(f"{self._host}/.s.PGSQL.{self._port}")
            return server
        return socket.create_connection((self._host, self._port))

    def _forward(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if self.frozen.is_set():
                    continue
                if answers and self.lose_answers > 0:
                    self.lose_answers -= 1
                    break
                target.sendall(data)
            self._break(source)
            self._break(target)

    @staticmethod
    def _break(each: socket.socket) -> None:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
