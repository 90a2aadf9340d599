"""An upstream that does everything an upstream can do wrong: raw sockets, so that nothing puts right what it sends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

BODY = b'{"rows":[1,2,3,4,5,6,7,8]}'
COST = 8


@dataclass
class Seen:
    """A request as it arrived.

    Fields:
        line: the request line.
        headers: as they arrived, names in lower case, in order.
        body: what came of it.
        whole: whether it came to its end.
        left: set when the gateway has closed the connection, or has it kept waiting for nothing.
    """

    line: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    whole: bool = False
    left: threading.Event = field(default_factory=threading.Event)

    def header(self, name: str) -> list[str]:
        """The values of a header."""
        return [value for known, value in self.headers if known == name]


class Upstream:
    """Listens, and behaves as the path says: `/<behaviour>/<whole or stream>/…`. A thread for each connection."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.release = threading.Event()
        self.gate = threading.Event()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        self.release.set()
        self._listener.close()

    def last(self, path: str) -> Seen:
        """The latest request to a path."""
        return [seen for seen in self.seen if seen.line.split(" ")[1].partition("?")[0] == path][-1]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            try:
                while (seen := self._read(file, connection)) is not None:
                    behaviour, _, shape = seen.line.split(" ")[1].partition("?")[0].strip("/").partition("/")
                    act: Callable[..., bool] = getattr(self, f"_{behaviour}", self._ok)
                    if not act(connection, seen, shape.startswith("stream")):
                        return
            except (OSError, ValueError):  # the gateway has left, or has stopped in the middle of a chunk
                pass

    def _read(self, file: Any, connection: socket.socket) -> Seen | None:
        line = file.readline()
        if not line:
            return None
        headers = []
        while (raw := file.readline().rstrip(b"\r\n")) != b"":
            name, _, value = raw.partition(b":")
            headers.append((name.decode().lower(), value.strip().decode()))
        seen = Seen(line.decode().strip(), headers)
        with self._lock:
            self.seen.append(seen)
        if length := seen.header("content-length"):
            seen.body = file.read(int(length[0]))
            seen.whole = len(seen.body) == int(length[0])
        elif seen.header("transfer-encoding"):
            echoing = "/echo/" in seen.line
            if echoing:
                self._head(connection, True)
            while size := int(file.readline(), 16):
                piece = file.read(size)
                seen.body += piece
                file.readline()
                if echoing:
                    connection.sendall(f"{size:x}\r\n".encode() + piece + b"\r\n")
            seen.whole = file.readline() == b"\r\n"
        return seen

    # -- behaviours: each answers whether the connection goes on ----------------------------------------------------

    def _head(self, connection: socket.socket, stream: bool, status: str = "200 OK", cost: str = str(COST)) -> None:
        framing = "Transfer-Encoding: chunked" if stream else f"Content-Length: {len(BODY)}"
        connection.sendall(
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nX-Agent-Cost: {cost}\r\n{framing}\r\n\r\n".encode()
        )

    def _body(self, connection: socket.socket, stream: bool, upto: int = len(BODY)) -> None:
        piece = BODY[:upto]
        connection.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if stream else piece)

    def _ok(self, connection: socket.socket, seen: Seen, stream: bool) -> bool:
        self._head(connection, stream)
        if not seen.line.startswith("HEAD "):
            self._body(connection, stream)
            connection.sendall(b"0\r\n\r\n" if stream else b"")
        return True

    def _exception(self, connection: socket.socket, seen: Seen, stream: bool) -> bool:
        """What an application's server says when it has raised."""
        connection.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\noops")
        return True

    def _before(self, connection: socket.socket, seen: Seen, stream: bool) -> bool:
        return False

    def _after(self, connection: socket.socket, seen: Seen, stream: bool) -> bool:
        self._head(connection, stream)
        return False

    def _middle(self, connection: socket.socket, seen: Seen, stream: bool) -> bool:
        self._head(connection, stream)
        self._body(connection, stream, upto=10)
        return False

    def _close(self, connection: socket.socket, seen: Seen, stream: bool) -> bool:
        """All but the very end."""
        self._head(connection, stream)
        self._body(connection, stream, upto=len(BODY) if stream else len(BODY) - 1)
        return False

    def _echo(self, connection: socket.socket, seen: Seen, stream: bool) -> bool:
        """Each piece went back as it came, while the body was read; this is the end of it."""
        connection.sendall(b"0\r\n\r\n")
        return True

    def _nothing(self, connection: socket.socket, seen: Seen, stream: bool) -> bool:
        connection.sendall(b"HTTP/1.1 204 No Content\r\nX-Agent-Cost: 0\r\n\r\n")
        return True

    def _gate(self, connection: socket.socket, seen: Seen, stream: bool) -> bool:
        """Answers when the test says so."""
        self.gate.wait(300)
        return self._ok(connection, seen, stream)

    def _small(self, connection: socket.socket, seen: Seen, stream: bool) -> bool:
        """A whole answer says how long it will be, and begins; a stream is there before anybody can know."""
        if stream:
            return self._ok(connection, seen, stream)
        self._head(connection, stream)
        self._body(connection, stream, upto=5)
        return self._wait(connection, seen)

    def _large(self, connection: socket.socket, seen: Seen, stream: bool) -> bool:
        """An answer that is larger than all that lies between here and a client who does not read it."""
        size = 1 << 28
        connection.sendall(f"HTTP/1.1 200 OK\r\nX-Agent-Cost: {COST}\r\nContent-Length: {size}\r\n\r\n".encode())
        try:
            for _ in range(size >> 16):
                connection.sendall(b"x" * (1 << 16))
        except OSError:
            seen.left.set()
        return False

    def _mirror(self, connection: socket.socket, seen: Seen, stream: bool) -> bool:
        connection.sendall(f"HTTP/1.1 200 OK\r\nX-Agent-Cost: 1\r\nContent-Length: {len(seen.body)}\r\n\r\n".encode())
        connection.sendall(seen.body)
        return True

    def _hang(self, connection: socket.socket, seen: Seen, stream: bool) -> bool:
        return self._wait(connection, seen)

    def _stall(self, connection: socket.socket, seen: Seen, stream: bool) -> bool:
        """An answer that begins and never ends."""
        self._head(connection, stream)
        self._body(connection, stream, upto=10)
        return self._wait(connection, seen)

    # The same under names whose routes leave it all the time it wants.
    _timeout = _linger = _hang
    _pause = _stall

    def _wait(self, connection: socket.socket, seen: Seen) -> bool:
        """Says nothing more; notes when the gateway leaves."""
        connection.settimeout(0.05)
        while not self.release.is_set():
            try:
                if connection.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        seen.left.set()
        return False
