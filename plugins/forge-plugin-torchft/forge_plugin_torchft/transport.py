"""The way of a state from a living group to one that is behind: HTTP, from each rank to the rank of the same number.

A reply is one line of JSON, then the bytes of the tensors. Nothing is pickled: torch's own stream, which torchft's
transport sends, would run the code of any process that answers. Both sides prove that they have the groups' secret: the
request by a header, the reply by a code after the line and after the tensors, without which nothing of it is used. The
lighthouse lets anybody join, so a group cannot trust the address that it is sent to.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchft.checkpointing import CheckpointTransport

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.runtime import State
from forge_core.parallel.mesh import local_part
from forge_plugin_torchft.secret import VARIABLE, is_loopback, proof

PROOF = "X-Forge-Proof"
"""Header of a request."""
NONCE = "X-Forge-Nonce"
"""Header of a request: a random number that the codes of its reply cover, so that no older reply can be sent again."""
CODE_BYTES = hashlib.sha256().digest_size


class SecretError(ForgeError):
    """The other side does not have the groups' secret, which waiting does not change."""


@frozen
class Received:
    """A state as it came, whose tensors are one rank's parts on the host."""

    step: int
    values: Mapping[str, Any]
    tensors: Mapping[str, tuple[Tensor, Sequence[int], bool]]
    """Part, shape of the whole, and whether it is split over ranks."""

    def state(self, like: Mapping[str, Tensor]) -> State:
        """The state, with split tensors placed like the parameter whose name theirs contains."""
        tensors = {}
        for name, (part, shape, is_split) in self.tensors.items():
            owner = _owner(name, like)
            device = like[owner].device if owner and part.dim() else part.device
            tensors[name] = _split(name, part, shape, like[owner] if owner else None) if is_split else part.to(device)
        return State(tensors, self.values)


def _owner(name: str, like: Mapping[str, Tensor]) -> str:
    return max((known for known in like if f".{known}." in f".{name}."), key=len, default="")


def _split(name: str, part: Tensor, shape: Sequence[int], like: Tensor | None) -> Tensor:
    if not isinstance(like, DTensor):
        rule = "layouts must be equal"
        raise ForgeError(f"the other group has {name} split over its ranks, and this one does not: {rule}")
    stride = torch.empty(tuple(shape), device="meta").stride()
    part = part.to(like.device)
    size = torch.Size(shape)
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=size, stride=stride)


def write_state(file: BinaryIO, state: State, key: bytes) -> None:
    """Write this rank's part of a state, with codes by which a reader that has the key authenticates the writer."""
    parts = {name: local_part(tensor.detach()).contiguous().cpu() for name, tensor in state.tensors.items()}
    heads = [
        [name, str(part.dtype).removeprefix("torch."), list(part.shape), list(whole.shape), isinstance(whole, DTensor)]
        for (name, whole), part in zip(state.tensors.items(), parts.values(), strict=True)
    ]
    values = {name: state.values[name] for name in ("progress", "optimizer", "extras")}
    line = json.dumps({"values": values, "tensors": heads}).encode() + b"\n"
    code = hmac.new(key, line, hashlib.sha256)
    file.write(line)
    file.write(code.digest())
    for part in parts.values():
        # As bytes, since numpy has no bfloat16
        data = part.reshape(-1).view(torch.uint8).numpy().data
        code.update(data)
        file.write(data)
    file.write(code.digest())


def read_state(file: BinaryIO, step: int, key: bytes) -> Received:
    """Read what `write_state` wrote.

    Raises:
        EOFError: the other side ended before its time.
        SecretError: what came was not written with this key, or was changed on its way.
    """
    line = file.readline()
    code = hmac.new(key, line, hashlib.sha256)
    _check_code(file, code)  # before the line is parsed: it decides how much memory is allocated
    head = json.loads(line)
    tensors = {}
    for name, dtype, shape, whole, is_split in head["tensors"]:
        part = torch.empty(shape, dtype=getattr(torch, dtype))
        # The tensor's own memory, into which the stream is read without a copy
        view = part.reshape(-1).view(torch.uint8).numpy().data
        filled = 0
        while filled < len(view):
            count = file.readinto(view[filled:])  # type: ignore[attr-defined]
            if not count:
                raise EOFError(f"the state of the other group ended within {name}")
            filled += count
        code.update(view)
        tensors[name] = part, whole, is_split
    _check_code(file, code)
    return Received(step, head["values"], tensors)


def _check_code(file: BinaryIO, expected: hmac.HMAC) -> None:
    code = file.read(CODE_BYTES)
    if len(code) < CODE_BYTES:
        raise EOFError("the state of the other group ended within a code")
    if not hmac.compare_digest(code, expected.digest()):
        raise SecretError("it was not written by a process that has the groups' secret, or was changed on its way")


class StateTransport(CheckpointTransport[Any]):  # type: ignore[misc]  # torchft has no types
    """Serves the given state once another group has requested it, and fetches the states of other groups."""

    def __init__(self, host: str, timeout_s: float, secret: bytes) -> None:
        """Listen on `host`, only on this machine if that is loopback. Both sides must show that they have `secret`."""
        self.asked = False
        """Whether a group waits for this rank's part of the state, since the last quorum."""
        self._host, self._timeout_s, self._secret = host, timeout_s, secret
        self._ready = threading.Condition()
        self._served: tuple[int, State] | None = None
        transport = self

        class Handler(BaseHTTPRequestHandler):
            timeout = timeout_s

            def do_GET(self) -> None:
                transport._reply(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: requests are no news for the user."""

        # An empty address is every interface; port 0 lets the system choose
        self._server = ThreadingHTTPServer(("127.0.0.1" if is_loopback(host) else "", 0), Handler)
        self._server.daemon_threads = True  # a reply to a group that has died must not keep this process alive
        threading.Thread(target=self._server.serve_forever, name="torchft-state", daemon=True).start()

    def metadata(self) -> str:
        """Returns the address of this rank's server, which torchft passes to a group that is behind."""
        return f"http://{self._host}:{self._server.server_address[1]}/"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Note a request for the state; torchft calls this in a separate thread, where no rank may communicate."""
        self.asked = True

    def serve(self, step: int, state: State) -> None:
        """Answer requests for `step` with `state`, until `disallow_checkpoint`."""
        with self._ready:
            self._served, self.asked = (step, state), False
            self._ready.notify_all()

    def disallow_checkpoint(self) -> None:
        """Drop the state: later requests wait for the next call of `serve`."""
        with self._ready:
            self._served = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Fetch the state of update `step` from the rank of this number in another group.

        Raises:
            SecretError: that group has another secret, or what came was not written with it.
            ForgeError: it has no state of this update within its time limit.
        """
        url = urlsplit(metadata)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=timeout.total_seconds())
        with closing(connection):
            path = f"/{step}"
            subject = f"{url.netloc}{path}"  # an intercepted proof is of no use at another server, or for another step
            nonce = secrets.token_hex(16)
            connection.request("GET", path, headers={PROOF: proof(self._secret, subject), NONCE: nonce})
            reply = connection.getresponse()
            if reply.status == http.HTTPStatus.FORBIDDEN:
                raise SecretError(f"{metadata} has another secret: set {VARIABLE} to the same text for all groups")
            if reply.status != http.HTTPStatus.OK:
                raise ForgeError(f"{metadata} has no state of update {step}: {reply.reason}")
            try:
                received = read_state(reply, step, self._reply_key(subject, nonce))
            except SecretError as error:
                raise SecretError(f"the state that {metadata} sent is refused: {error}") from error
        return {"user": {"default": received}, "torchft": {"step": step, "batches_committed": 0}}

    def shutdown(self, wait: bool = True) -> None:
        """Stop the server and free its port; replies under way end with the process."""
        self._server.shutdown()
        self._server.server_close()

    def _reply(self, request: BaseHTTPRequestHandler) -> None:
        subject = f"{request.headers.get('Host', '')}{request.path}"
        shown = request.headers.get(PROOF, "")
        if not hmac.compare_digest(shown.encode(), proof(self._secret, subject).encode()):
            request.send_error(http.HTTPStatus.FORBIDDEN, "no proof of the groups' secret")
            return
        step = int(request.path.strip("/"))
        with self._ready:
            self._ready.wait_for(lambda: self._served is not None and self._served[0] == step, self._timeout_s)
            served = self._served
        if served is None or served[0] != step:
            request.send_error(503, f"there is no state of update {step} here")
            return
        request.send_response(200)
        request.end_headers()
        key = self._reply_key(subject, request.headers.get(NONCE, ""))
        write_state(request.wfile, served[1], key)  # type: ignore[arg-type]

    def _reply_key(self, subject: str, nonce: str) -> bytes:
        """A key for one reply; "reply" keeps it apart from the proofs of requests, which travel in the open."""
        return bytes.fromhex(proof(self._secret, f"reply {subject} {nonce}"))
