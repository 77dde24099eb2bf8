"""The stage `torchft`: its keys, and the sums over groups that it adds to a step."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from attrs import field, frozen
from attrs.validators import ge, gt

from forge_core.contracts.components import ParallelComponent, TrainingHook
from forge_core.contracts.errors import Problem
from forge_core.contracts.runtime import ParallelStage
from forge_plugin_torchft.groups import Groups
from forge_plugin_torchft.outer import periodic
from forge_plugin_torchft.secret import is_loopback

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model
    from forge_core.job import Job
    from forge_plugin_torchft.session import Session

VARIABLE = "FORGE_GROUP"
"""Environment variable of the group's number, where the job does not have it."""
LATER = ("replicate", "fsdp", "tp", "ep", "cp", "pp")
"""Stages whose sums of gradients come first: last applied is first to complete."""


@frozen(kw_only=True, slots=False)  # with a `__dict__`, which `session` needs
class TorchFT(ParallelComponent):
    """Several runs, the groups, train one model, each on its rows of every global batch, and outlive each other.

    A group is a separate `forge-run`, with its own ranks, folder and checkpoints. In each step gradients are summed
    over the groups that are present, weighted by tokens. A group that is lost costs the others one step; one that comes
    back receives the state of a living one (torchft, Meta 2025).
    """

    before: ClassVar[Mapping[str, str]] = dict.fromkeys(LATER, "gradients of a group are complete before groups sum")

    groups: int = field(validator=gt(0))
    """Groups that share each global batch: `train.global_batch_size` counts the sequences of all of them."""
    group: int | None = None
    """Number of this group, from 0; None: the environment variable `FORGE_GROUP`."""
    lighthouse: str
    """Address of the lighthouse, which tracks the groups that are present: `http://host:29510`."""
    min_groups: int = field(default=1, validator=gt(0))
    """Groups that must be present for an update; with fewer, those that are there wait."""
    timeout_s: float = field(default=120.0, validator=gt(0))
    """Seconds that groups wait for one that is present but silent. It must be longer than a save, an evaluation and
    the first step of a group that comes back, with its compilation."""
    start_wait_s: float = field(default=60.0, validator=ge(0))
    """Seconds that the first groups wait for all others before the first step, at the start and after a stop."""
    wait_s: float = field(default=1800.0, validator=gt(0))
    """Seconds that a group waits for `min_groups` before it ends with an error."""
    connect_timeout_s: float = field(default=10.0, validator=gt(0))
    """Seconds in which the lighthouse must answer when the run starts."""
    host: str = ""
    """Name under which other groups reach this machine; empty: its host name, or loopback if the lighthouse is."""
    trusted_network: bool = False
    """Whether only machines that you trust reach the ports of lighthouse and groups. Without it all of them must be on
    loopback, since torchft's servers, torch's store and the sums of gradients have no secret."""
    check_every: int = field(default=100, validator=ge(0))
    """Steps between comparisons of the weights over groups, which must be equal to the bit; 0: never."""

    @cached_property
    def session(self) -> Session:
        """The connection to the other groups, shared by stage and hooks."""
        from forge_plugin_torchft.session import Session

        return Session(self)

    @property
    def number(self) -> int:
        """Number of this group; -1 if neither job nor environment has it."""
        if self.group is not None:
            return self.group
        text = os.environ.get(VARIABLE, "")
        return int(text) if text.isdecimal() else -1

    @property
    def reached_at(self) -> str:
        """The name under which other groups reach this machine."""
        address = urlsplit(self.lighthouse).hostname or ""
        return self.host or ("127.0.0.1" if is_loopback(address) else socket.gethostname())

    @property
    def open_to_network(self) -> bool:
        """Whether lighthouse or group can be reached from other machines."""
        return not (is_loopback(urlsplit(self.lighthouse).hostname or "") and is_loopback(self.reached_at))

    def part_of_batch(self) -> tuple[int, int]:
        """Returns the part of this group; without a number, which `problems` reports, the first one."""
        return max(0, self.number), self.groups

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        if self.number < 0:
            yield Problem("group", f"is not set, and {VARIABLE} is not a number; set it to 0 to {self.groups - 1}")
        elif self.number >= self.groups:
            yield Problem("group", f"is {self.number}; with groups = {self.groups} it is 0 to {self.groups - 1}")
        # Not as the end of a longer number: `run-11` is no name for group 1
        elif not re.search(rf"(?<!\d){self.number}$", job.job.name):
            name = f"{job.job.name}-{self.number}"
            rule = f"so that no two groups have one run folder; give --job.name={name}"
            yield Problem("", f"job.name = {job.job.name!r} must end with this group's number, {self.number}, {rule}")
        if self.min_groups > self.groups:
            yield Problem("min_groups", f"is {self.min_groups}, but there are only {self.groups} groups")
        if not re.fullmatch(r"https?://[^/:]+(\.[^/:]+)*:\d+|https?://\[[0-9a-f:]+\]:\d+", self.lighthouse):
            yield Problem("lighthouse", f"is {self.lighthouse!r}; an address is http://host:port")
        if self.open_to_network and not self.trusted_network:
            place = f"this group is reached at {self.reached_at}, its lighthouse is {self.lighthouse}"
            risk = "torchft has no secret, so whoever reaches their ports can join, change sums and end the run"
            hint = "set it to true if only machines that you trust reach them"
            yield Problem("trusted_network", f"is false, but {place}: {risk}; {hint}")
        if sum(isinstance(stage, TorchFT) for stage in job.parallel.values()) > 1:
            yield Problem("", "a job has one stage torchft at most")
        if self.start_wait_s > self.wait_s:
            yield Problem("start_wait_s", f"{self.start_wait_s:g} is longer than wait_s = {self.wait_s:g}")

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """Adds `Groups`; hooks of a job that agree in rounds are listed by the job itself."""
        return [Groups(settings=self)]

    def build(self, context: BuildContext) -> ParallelStage:
        """Also makes the digest of all that groups must have in common, which they compare when they meet."""
        # Not `repr(job)`: paths of data, and where a run writes, may differ between machines.
        job = context.job
        parts = (job.job.seed, job.train, job.model, job.optimizer, job.scheduler, job.loss, periodic(job))
        text = repr((*parts, context.layout.sizes, self.groups, [source.weight for source in job.data.sources]))
        # 48 bits, which float64 holds exactly: groups compare digests in a sum of numbers
        self.session.job_digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")
        self.session.every_step = periodic(job) is None
        return TorchFTStage(self, context)


class TorchFTStage(ParallelStage):
    """Leaves the model as it is, and sums counts, metrics and gradients over the groups that are present."""

    def __init__(self, settings: TorchFT, context: BuildContext) -> None:
        self._settings, self._session = settings, settings.session

    def describe(self) -> str:
        """Returns group, lighthouse, and whether other machines reach the ports, none of which has a secret."""
        this = self._settings
        reach = "open to the network without a secret" if this.open_to_network else "on loopback only"
        return f"group {this.number} of {this.groups}, lighthouse {this.lighthouse}, {reach}"

    def sum_over_runs(self, sums: Tensor) -> int:
        """Sum over the groups that take part; outside of training steps, and with rounds, this group is alone."""
        session = self._session
        return session.sum_counts(sums) if session.in_step and session.every_step else 1

    def complete_gradients(self, model: Model) -> None:
        """Sum gradients over groups; stages that are applied later have completed them in the group."""
        from forge_core.parallel.mesh import sum_gradients

        if self._session.in_step and self._session.every_step:
            sum_gradients(model.parameters(), self._session.sum)
