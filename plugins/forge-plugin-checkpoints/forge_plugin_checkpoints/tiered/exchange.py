"""Transfers checkpoint files between machines over TCP: each rank serves its machine's files and fetches from others.

A request is a line of JSON with the secret of the server, followed by bytes and their CRC-32. The CRC-32 only detects
transmission errors: the SHA-256 in the manifest defines what a file must be.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import socketserver
import threading
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import frozen

from forge_core import report_progress
from forge_core.checkpoint.storage import own_file

BLOCK = 1 << 20
TIMEOUT_S = 60.0
"""Seconds without a byte after which the other side is gone."""


@frozen
class Peer:
    """A rank, as others reach it."""

    node: str
    host: str
    port: int
    secret: str


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128  # many ranks connect at once when they restart or save

    def handle_error(self, *_: object) -> None:
        """The other side sees the connection end, and reports it."""


class Exchange:
    """This rank's server, and its requests to others."""

    def __init__(self, node: str, find: Callable[[int, str], list[Path]], room: Callable[[int], Path]) -> None:
        """Start to serve.

        Args:
            node: name of this machine.
            find: paths at which a file of a step may be on this machine.
            room: folder for files of a step that others send.
        """
        secret = secrets.token_hex(16)

        class Handler(socketserver.StreamRequestHandler):
            timeout = TIMEOUT_S

            def handle(self) -> None:
                # Bounded, as the other side has not shown the secret yet
                request = json.loads(self.rfile.readline(1 << 16))
                # In constant time, which does not show how much of a guess is right
                if not hmac.compare_digest(request["secret"], secret):
                    return
                step, name = int(request["step"]), own_file(request["name"])
                if request["do"] == "get":
                    _serve(self.wfile, find(step, name))
                else:
                    folder = room(step)
                    folder.mkdir(parents=True, exist_ok=True)
                    _receive(self.rfile, request["size"], folder / name)
                    self.wfile.write(b"ok\n")

        # At any free port, as several ranks of a machine serve; peers get its number with the address
        self._server = _Server(("", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True, name="memory-checkpoints").start()
        self.own = Peer(node, _own_address(), self._server.server_address[1], secret)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def put(self, peer: Peer, step: int, path: Path) -> None:
        """Send a file of a step that is not committed yet. Raises an `OSError` unless the other side has it."""
        size = path.stat().st_size
        with _connected(peer, do="put", step=step, name=path.name, size=size) as stream, path.open("rb") as file:
            _send(stream, file)
            stream.flush()
            if stream.readline() != b"ok\n":
                raise ConnectionError(f"{peer.node} did not take {path.name} of step {step}")

    def get(self, peer: Peer, step: int, name: str, target: Path) -> None:
        """Fetch a file; `target` appears only when it is whole. Raises an `OSError`."""
        with _connected(peer, do="get", step=step, name=name) as stream:
            size = json.loads(stream.readline() or "null")
            if size is None:
                raise FileNotFoundError(f"{peer.node} has no {name} of step {step}")
            _receive(stream, size, target)


def _connected(peer: Peer, **request: Any) -> Any:
    connection = socket.create_connection((peer.host, peer.port), timeout=TIMEOUT_S)
    stream: Any = connection.makefile("rwb")
    connection.close()  # the stream keeps it open
    stream.write(json.dumps({"secret": peer.secret, **request}).encode() + b"\n")
    stream.flush()
    return stream


def _serve(stream: Any, paths: list[Path]) -> None:
    for path in paths:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            continue
        with file:
            stream.write(f"{os.fstat(file.fileno()).st_size}\n".encode())
            _send(stream, file)
        return
    stream.write(b"null\n")


def _send(stream: Any, file: Any) -> None:
    check = 0
    while data := file.read(BLOCK):
        stream.write(data)
        # TCP's checksums have 16 bits, and miss some errors
        check = zlib.crc32(data, check)
        report_progress("sending")
    stream.write(check.to_bytes(4, "big"))


def _receive(stream: Any, size: int, target: Path) -> None:
    unfinished, check, left = target.with_name(f".{uuid.uuid4().hex}"), 0, size
    try:
        with unfinished.open("wb") as file:
            while left:
                data = stream.read(min(BLOCK, left))
                if not data:
                    raise ConnectionError(f"the connection ended {left} bytes before {target.name} did")
                file.write(data)
                check = zlib.crc32(data, check)
                left -= len(data)
                report_progress("receiving")
        if stream.read(4) != check.to_bytes(4, "big"):
            raise ConnectionError(f"{target.name} was damaged on the way")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _own_address() -> str:
    """The address of this machine on the network by which its run's ranks meet."""
    meeting = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((meeting, 9))  # sends nothing; chooses the route
        except OSError:
            return "127.0.0.1"
        address = str(probe.getsockname()[0])
    # Rank 0's own name often means loopback on its machine; others reach it by that name
    return meeting if address.startswith("127.") else address
