"""The connection of one rank to the ranks of the same number in the other groups, by torchft's Manager.

G: groups of the job.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from forge_core.contracts.errors import ForgeError
from forge_core.launch.progress_beacon import report_progress
from forge_core.parallel.mesh import gather_objects, global_rank, local_part, world_size

# Before torchft: its library reads this once. It reports each heartbeat's change in many lines; what concerns the user
# is said here in one.
os.environ.setdefault("RUST_LOG", "error")
logging.getLogger("torchft").setLevel(logging.CRITICAL)

try:
    from torchft import manager as manager_module
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

    from forge_plugin_torchft.secret import group_secret, is_loopback
    from forge_plugin_torchft.transport import Received, SecretError, StateTransport
except ImportError as error:
    reason = f"parallel.torchft needs the package torchft, which cannot be imported: {error}"
    raise ForgeError(f"{reason}; install it: pip install 'torchft>=0.2,<0.3'") from error

if TYPE_CHECKING:
    from forge_core.contracts.contexts import TrainContext
    from forge_core.contracts.model import Model
    from forge_core.contracts.runtime import State
    from forge_plugin_torchft.stage import TorchFT

logger = logging.getLogger(__name__)

PAUSE_S = 0.2
"""Seconds between two looks for further groups."""
DIGEST = 1 << 48
"""Digests are below it, so that float64 holds them exactly."""
AGAIN = "a group has failed while groups met"


def _any_rank(flags: Sequence[bool]) -> list[bool]:
    """Whether any rank of this group has each flag set. Collective."""
    known = torch.tensor(flags, dtype=torch.uint8)
    dist.all_reduce(known, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in known.tolist()]


def _serve_store(host: str) -> TCPStore:
    """A store for the groups, which torch would serve to all networks."""
    if not is_loopback(host):
        return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    # Detached: Python would close the descriptor with its own object
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _manager_at(host: str, **arguments: Any) -> Manager:
    """Torchft's manager, which listens on loopback if this machine is reached there."""
    if not is_loopback(host):
        return Manager(hostname=host, **arguments)
    served = manager_module.ManagerServer

    def on_loopback(*, bind: str, **more: Any) -> Any:
        return served(bind=f"127.0.0.1:{bind.rpartition(':')[2]}", **more)

    # `Manager` has no argument for the address, and binds to all interfaces (torchft 0.2)
    manager_module.ManagerServer = on_loopback
    try:
        return Manager(hostname=host, **arguments)
    finally:
        manager_module.ManagerServer = served


class Session:
    """Sums over groups, agreement on updates, and who is present. Every method is called on every rank of the group."""

    def __init__(self, settings: TorchFT) -> None:
        self._settings = settings
        self.job_digest = 0
        self.every_step = True
        """Whether groups sum gradients in each step; False: at the end of a round."""
        self.in_step = False
        """Whether sums of a step are sums over groups, as they are not in a dry run or an evaluation."""
        self.participants = 0
        self._manager: Manager | None = None
        self._pending: Received | None = None
        self._changes, self._known_changes = 0, 0
        self._began, self._is_new, self._waits = 0.0, True, False
        self._fed: list[float] = []
        self._committed = False
        self._waiting_for = ""

    # --- the life of the connection -----------------------------------------------------------------------------------

    def open(self, context: TrainContext) -> None:
        """Connect to the lighthouse. Raises a ForgeError if it does not answer."""
        self.close()
        settings = self._settings
        self._check_lighthouse()
        host = settings.reached_at
        device = next(context.model.parameters()).device
        timeout, connect = (timedelta(seconds=s) for s in (settings.timeout_s, settings.connect_timeout_s))
        store = _serve_store(host) if global_rank() == 0 else None
        address = gather_objects((host, store.port) if store else None)[0]
        self._store = store  # the other groups meet in the store of one of them
        self._transport = StateTransport(host, settings.timeout_s, group_secret())
        session = self
        kind: Any = ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo

        class Noticing(kind):  # type: ignore[misc]
            """Counts the changes of who is present."""

            def configure(self, *args: Any, **kwargs: Any) -> None:
                super().configure(*args, **kwargs)
                session._changes += 1

        self._manager = _manager_at(
            host,
            pg=Noticing(timeout),
            load_state_dict=self._received,
            state_dict=dict,
            min_replica_size=settings.min_groups,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=settings.wait_s),
            connect_timeout=connect,
            rank=global_rank(),
            world_size=world_size(),
            store_addr=address[0],
            store_port=address[1],
            lighthouse_addr=settings.lighthouse,
            replica_id=f"group{settings.number}",
            checkpoint_transport=self._transport,
            init_sync=False,  # all groups draw the same initial weights
            quorum_retries=1000,  # a lighthouse that restarts at its address has no state, and needs none
        )
        self._began, self._is_new, self._waits = time.monotonic(), True, False
        self._known_changes = self._changes = 0
        self._device = device
        self._ticks = threading.Event()
        threading.Thread(target=self._report, args=(self._ticks,), name="torchft-waits", daemon=True).start()

    def close(self) -> None:
        """Leave the other groups."""
        if self._manager is not None:
            self._ticks.set()
            self._manager.shutdown(wait=False)
            self._manager = None

    def _check_lighthouse(self) -> None:
        """One connection that has a deadline: torchft would report an error of its transport, on one rank."""
        address, limit = self._settings.lighthouse, self._settings.connect_timeout_s
        url, deadline, reason = urlsplit(address), time.monotonic() + limit, "no answer"
        while time.monotonic() < deadline:
            try:
                socket.create_connection(
                    (url.hostname, url.port), timeout=max(0.1, deadline - time.monotonic())
                ).close()
                return
            except OSError as error:
                reason = str(error)
            time.sleep(PAUSE_S)  # it may be starting
        hint = f"start one (forge-run launch lighthouse --port={url.port}), or correct parallel.torchft.lighthouse"
        raise ForgeError(f"the lighthouse {address} cannot be reached for {limit:g} s: {reason}; {hint}")

    def _received(self, received: Received) -> None:
        self._pending = received

    def _report(self, ended: threading.Event) -> None:
        while not ended.wait(1.0):
            if self._waiting_for:
                report_progress(self._waiting_for)

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Report to the watchdog, within this context, that this rank waits for other groups: each wait has a limit."""
        self._waiting_for = what
        try:
            yield
        finally:
            self._waiting_for = ""

    # --- who is present -----------------------------------------------------------------------------------------------

    def quorum(self, commits: int, context: TrainContext, *, heal: bool = True, shrink: bool = False) -> State | None:
        """Agree with the other groups on who takes part in what follows.

        Args:
            commits: updates that this group has made; the groups that have made most have the state of the others.
            context: of a hook, between two steps.
            heal: whether a group that is behind receives the state of another one.
            shrink: take only groups that are present already.

        Returns:
            The state to continue from, if this group was behind.

        Raises:
            ForgeError: fewer than `min_groups` are present for `wait_s`, the lighthouse is gone, or the groups have
                different jobs, different secrets or the same number.
        """
        settings, healed = self._settings, None
        deadline = time.monotonic() + settings.wait_s
        while True:
            with self._waiting("waiting for other groups"):
                self._ask(commits, heal, shrink, max(1.0, deadline - time.monotonic()))
            healed, self._pending = self._pending or healed, None
            commits = healed.step if healed else commits
            failed, asked = _any_rank([self._manager_.errored() is not None, self._transport.asked])
            if asked:  # on all ranks: a state may be collective, and a request may reach only some ranks
                self._transport.serve(commits, context.take_state())
            present = self._manager_.num_participants()
            good = not failed and self._know_each_other(present, healed is not None)
            if good and present >= settings.min_groups and not self._waits:
                break
            if time.monotonic() > deadline:
                short = f"{present} of {settings.groups} groups are present, and min_groups = {settings.min_groups}"
                raise ForgeError(f"torchft: {AGAIN if failed else short}, for {settings.wait_s:g} s")
            with self._waiting(f"{present} of {settings.groups} groups are present"):
                time.sleep(PAUSE_S)
        if present != self.participants and global_rank() == 0:
            logger.warning("torchft: %d of %d groups are present", present, settings.groups)
        if healed and global_rank() == 0:
            logger.warning("torchft: this group continues from the state of another one, after update %d", healed.step)
        self.participants, self._is_new, self._committed = present, False, False
        own = {**dict(context.model.named_parameters()), **dict(context.model.named_buffers())}
        return healed.state(own) if healed else None

    @property
    def _manager_(self) -> Manager:
        assert self._manager is not None
        return self._manager

    @property
    def takes_part(self) -> bool:
        """Whether this group is as far as the others of the last quorum."""
        return bool(self._manager_.is_participating())

    def _ask(self, commits: int, heal: bool, shrink: bool, limit_s: float) -> None:
        # torchft counts steps, and decides by its count which group is behind: it gets ours
        self._manager_.load_state_dict({"step": commits, "batches_committed": 0})
        try:
            self._manager_.start_quorum(allow_heal=heal, shrink_only=shrink, timeout=timedelta(seconds=limit_s))
        except Exception as error:
            address = self._settings.lighthouse
            raise ForgeError(f"torchft: no agreement by the lighthouse {address} on the groups: {error}") from error
        failure = self._manager_.errored()
        if failure is not None and isinstance(failure.original_exception, SecretError):
            raise failure.original_exception  # torchft would try again until `wait_s`, without a reason in the end

    def _know_each_other(self, present: int, healed: bool) -> bool:
        """Compare jobs and numbers when groups have come or gone; returns whether groups could meet."""
        settings = self._settings
        if self._changes == self._known_changes and not self._waits:
            return True
        wants = self._is_new and not healed and time.monotonic() - self._began < settings.start_wait_s
        table = torch.zeros(3, settings.groups, dtype=torch.float64, device=self._device)
        table[:, settings.number] = torch.tensor([1.0, self.job_digest % DIGEST, wants], dtype=torch.float64)
        self.sum(table)
        failed = _any_rank([self._manager_.errored() is not None])[0]
        if failed:
            self.commit()  # so that the lighthouse makes the groups reconnect
            self._waits = False
            return False
        count, digests, waits = table.tolist()
        self._known_changes = self._changes
        if self._is_new and count[settings.number] > 1:
            raise ForgeError(f"parallel.torchft.group: another run is group {settings.number} already")
        others = [n for n, d in enumerate(digests) if count[n] == 1 and d != self.job_digest % DIGEST]
        if self._is_new and others:
            hint = "only name, folders, loggers and the group's number may differ"
            raise ForgeError(f"parallel.torchft: the job of group {others[0]} is another one than this group's; {hint}")
        self._waits = present < settings.groups and any(waits)
        return True

    def anywhere(self, flag: bool) -> bool:
        """Whether any rank of this group has the flag set."""
        return _any_rank([flag])[0]

    # --- one step -----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step: sums are over groups until `in_step` is reset, and the first counts are its tokens."""
        self.in_step, self._fed = True, []

    def sum(self, tensor: Tensor) -> None:
        """Sum over the groups that take part, in place. A failure is recorded, and `commit` then returns False."""
        with self._waiting("summing over groups"):
            self._manager_.allreduce(tensor, reduce_op=dist.ReduceOp.SUM).wait()

    def sum_counts(self, sums: Tensor) -> int:
        """Sum counts in place; returns the groups that take part. The first of a step are its tokens."""
        if self._fed:
            self.sum(sums)
            return self.participants
        # A place for each group, so that one sum shows the tokens of each
        table = torch.zeros(self._settings.groups, dtype=sums.dtype, device=sums.device)
        table[self._settings.number] = sums[0]
        self.sum(table)
        sums[0], self._fed = table.sum(), table.tolist()
        return self.participants

    def commit(self) -> bool:
        """Whether the update is to be made: every sum of this group since the quorum has succeeded."""
        with self._waiting("agreeing on the update"):
            self._committed = bool(self._manager_.should_commit())
        return self._committed

    def facts_of_step(self) -> dict[str, float]:
        """Groups behind the update, and tokens fed, of all and of each: none of an update that was left out."""
        fed = self._fed if self._committed else [0.0] * self._settings.groups
        each = {f"fed/{number}": tokens for number, tokens in enumerate(fed)}
        return {"participants": self.participants if self._committed else 0, "fed": sum(fed), **each}

    def compare_weights(self, model: Model) -> None:
        """Raises a ForgeError if the weights differ from another group's weights, by an exact sum of their bits."""
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        parts = [local_part(parameter.detach()).contiguous() for parameter in model.parameters()]
        bits = [part.view(kinds[part.element_size()]).sum(dtype=torch.int64) for part in parts]
        digest = int(torch.stack(bits).sum()) % DIGEST
        table = torch.zeros(2, self._settings.groups, dtype=torch.float64, device=self._device)
        table[:, self._settings.number] = torch.tensor([1.0, digest], dtype=torch.float64)
        self.sum(table)
        if self._manager_.errored() is not None:  # the next step will notice that a group is gone
            return
        count, digests = table.tolist()
        others = [number for number, d in enumerate(digests) if count[number] and d != digest]
        if others:
            raise ForgeError(
                f"the weights of group {self._settings.number} and group {others[0]} are not bit-identical: a "
                "computation went wrong in one of them, or something in the job depends on its group"
            )
