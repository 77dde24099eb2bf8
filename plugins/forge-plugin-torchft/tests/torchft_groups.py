"""Groups as forked processes, their lighthouse, and the same training in one process, by plain torch."""

from __future__ import annotations

import gc
import io
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import define
from torch.nn import functional as F

from forge_core.contracts.components import TrainingHook
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import build_context, build_run
from forge_core.engine.trainer import Trainer
from forge_core.job import Job
from forge_core.launch.progress_beacon import report_progress
from forge_core.plugins.catalog import Catalog
from forge_plugin_torchft import TorchFT
from forge_plugin_torchft.session import Session
from forge_testing import tiny_job
from forge_testing.processes import run_on_ranks

FORK: Any = multiprocessing.get_context("fork")


@define(kw_only=True, slots=False)
class Watch(TrainingHook):
    """Kills its process at a step, waits at another until a file is there, asks for a stop; keeps the last weights."""

    resumes_as = "safe"
    kill_at: int = 0
    wait_at: int = 0
    wait_for: str = ""
    stop_at: int = 0
    signal_at: int = 0

    def on_step_begin(self, context):
        while context.step == self.wait_at and not os.path.exists(self.wait_for):
            report_progress("waiting for the other group")
            time.sleep(0.02)
        if context.step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if context.step == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_step_end(self, context):
        if context.step == self.stop_at:
            context.request_stop("as the test says")

    def on_train_end(self, context):
        self.weights = {name: p.detach().clone() for name, p in context.model.named_parameters()}


class Lighthouse:
    """A lighthouse in a process of its own: its threads must not be forked."""

    def __enter__(self) -> str:
        answer, ask = FORK.Pipe(duplex=False)
        self._process = FORK.Process(target=self._serve, args=(ask,), daemon=True)
        self._process.start()
        return answer.recv()

    def _serve(self, ask: Any) -> None:
        from torchft.coordination import LighthouseServer

        quick = {"join_timeout_ms": 20_000, "heartbeat_timeout_ms": 800, "quorum_tick_ms": 20}
        server = LighthouseServer(bind="[::]:0", min_replicas=1, **quick)
        ask.send(server.address())
        signal.pause()

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()


class Group:
    """A run of one group in a forked process."""

    def __init__(self, job: Job, watch: Watch | None = None, mark: Path | None = None) -> None:
        """With `mark`, that file is there from the moment on at which the lighthouse hears of the group."""
        self._answer, ask = FORK.Pipe(duplex=False)
        self.job, self.folder = job, Path(job.job.output) / job.job.name
        sys.stdout.flush()
        if dist.is_initialized():  # a child that inherits a group hangs, or aborts when it frees it
            dist.destroy_process_group()
        gc.collect()
        gc.freeze()
        self.process = FORK.Process(target=self._run, args=(ask, watch or Watch(), mark), daemon=True)
        self.process.start()
        ask.close()

    def _run(self, ask: Any, watch: Watch, mark: Path | None) -> None:
        torch.set_num_threads(1)
        connect = Session.open
        if mark is not None:
            Session.open = lambda self, context: (connect(self, context), mark.touch())
        code = 0
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            Trainer(self.job, hooks=[watch], catalog=Catalog.installed(), echo=lambda text: None).run()
            buffer = io.BytesIO()
            torch.save(watch.weights, buffer)
            ask.send(buffer.getvalue())
        except BaseException as error:
            ask.send(str(error))
            code = getattr(error, "exit_code", 1)
        os._exit(code)

    def wait(self) -> Any:
        """The weights in the end, an error in words, or None of a process that was killed."""
        try:
            value = self._answer.recv() if self._answer.poll(90) else "timed out"
        except EOFError:
            value = None
        self.process.kill() if value == "timed out" else None
        self.process.join()
        return torch.load(io.BytesIO(value)) if isinstance(value, bytes) else value

    def lines(self) -> list[dict[str, Any]]:
        records = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [record for record in records if "loss" in record]


def group_job(folder: Path, lighthouse: str, group: int, groups: int = 2, **changes: Any) -> Job:
    stage = TorchFT(
        groups=groups,
        group=group,
        lighthouse=lighthouse,
        trusted_network=True,
        timeout_s=10.0,
        start_wait_s=20.0,
        check_every=2,
    )
    return plain_job(folder, job={"name": f"group-{group}"}, parallel={"torchft": stage}, **changes)


def plain_job(folder: Path, **changes: Any) -> Job:
    train = {"precision": "fp64", "global_batch_size": 8, **changes.pop("train", {})}
    return tiny_job(str(folder), Catalog.installed(), **train, **changes)


def apart(function: Callable[[], Any]) -> Any:
    """The result of a function in a process of its own: this one forks, and must have no process group."""
    return run_on_ranks(1, lambda rank: function())[0]


class OneProcess:
    """The training of a job in one process: rows that are given in each step, loss by torch, mean over tokens."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.run = build_run(job, build_context(job, Catalog.installed(), folder))
        self._loader = TrainLoader(job, self.run.datasets, self.run.context)
        self.losses: list[float] = []

    def rows(self) -> dict[str, torch.Tensor]:
        """The next global batch."""
        batches = self._loader.next_step()
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def gradients(self, rows: dict[str, torch.Tensor]) -> None:
        """Of the mean loss over the valid tokens of these rows."""
        model = self.run.model
        logits = model.head.logits(model(rows))
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), ignore_index=-100)
        loss.backward()
        self.losses.append(loss.item())

    def update(self) -> None:
        gradients = [parameter.grad for parameter in self.run.model.parameters()]
        norm = torch.nn.utils.get_total_norm(gradients)  # `clip_grad_norm_` would add 1e-6 to it
        torch._foreach_mul_(gradients, (self.run.job.train.grad_clip_norm / norm).clamp(max=1))
        self.run.optimizer.step()
        self.run.optimizer.zero_grad()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.run.model.named_parameters()}


def pick(batch: dict[str, torch.Tensor], groups: list[int], of: int) -> dict[str, torch.Tensor]:
    """The rows of these groups."""
    share = len(batch["labels"]) // of
    index = torch.cat([torch.arange(share * group, share * (group + 1)) for group in groups])
    return {name: tensor[index] for name, tensor in batch.items()}


def by_fed(line: dict[str, Any], groups: int) -> list[int]:
    """The groups that were fed in a step, as its line says."""
    return [group for group in range(groups) if line[f"fed/{group}"]]
