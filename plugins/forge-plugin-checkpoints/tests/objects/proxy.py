"""A proxy in front of an HTTP server that delays, cuts connections, or answers 503, by rules."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from contextlib import suppress

from attrs import define, field


@define
class Rule:
    """What happens to requests whose first line, such as `PUT /bucket/key?query HTTP/1.1`, has `pattern`."""

    pattern: str
    action: str
    """`503`, `reset` (after `bytes` of the request), `delay` (by `seconds`) or `stall` (no answer, ever)."""
    times: int = 10**9
    """How many such requests are concerned."""
    skip: int = 0
    """How many such requests pass before."""
    bytes: int = 0
    seconds: float = 0.0
    hits: int = field(init=False, default=0)

    def takes(self, line: str) -> bool:
        if not re.search(self.pattern, line):
            return False
        self.hits += 1
        return self.skip < self.hits <= self.skip + self.times


class Proxy:
    """Serves on a free port of this machine while it is entered."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.rules: list[Rule] = []
        self.lines: list[str] = []
        """First lines of all requests."""
        self._lock = threading.Lock()

    def __enter__(self) -> Proxy:
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            self._answer(client)
        except OSError:  # either side has gone; at the end of tests, the server before the last retries of its clients
            client.close()

    def _answer(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            data = client.recv(1 << 16)
            if not data:
                client.close()
                return
            head += data
        line = head.split(b"\r\n", 1)[0].decode()
        with self._lock:
            self.lines.append(line)
            rule = next((rule for rule in self.rules if rule.takes(line)), None)
        if rule is not None and rule.action == "503":
            client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            client.close()
            return
        if rule is not None and rule.action == "stall":
            time.sleep(600)
        if rule is not None and rule.action == "delay":
            time.sleep(rule.seconds)
        limit = rule.bytes if rule is not None and rule.action == "reset" else None
        # One request for each connection: then what comes after its head is its body
        head = head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
        server = socket.create_connection(("127.0.0.1", self._target))
        back = threading.Thread(target=self._pump, args=(server, client, None), daemon=True)
        back.start()
        server.sendall(head)
        if limit is not None and len(head) >= limit:
            self._reset(client, server)
        else:
            self._pump(client, server, limit if limit is None else limit - len(head))

    def _pump(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        passed = 0
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
                passed += len(data)
                if limit is not None and passed >= limit:
                    self._reset(source, target)
                    return
        except OSError:
            pass
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _reset(self, *ends: socket.socket) -> None:
        for end in ends:
            # Lingering for no time: the other side sees a reset, not an orderly end
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()
