"""The logger `wandb`."""

from __future__ import annotations

import netrc
import os
import shutil
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import wandb

from forge_core.contracts.errors import ExitCode, ForgeError
from forge_kit.tools.metrics import read_metrics
from forge_kit.tools.tracking import TrackedRun, count_rows, is_sent, numbers

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_wandb.weights_and_biases import Wandb

PUBLIC = "https://api.wandb.ai"
PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp")
FILES = "handed-on"
"""Folder among the files of the W&B run."""


class WandbLogger:
    """See `forge_core.contracts.runtime.Logger`."""

    def __init__(self, component: Wandb, context: BuildContext) -> None:
        self._component, self._context = component, context
        self._code: int = ExitCode.FAILED  # unless the run reports how it ends

    def start(self, step: int) -> None:
        """Begin the run at W&B, or continue it; without credentials or a server, an error before the first step."""
        component = self._component
        if component.mode == "online":
            _refuse_missing_credentials(component.base_url)
        self._tracked = TrackedRun.begin(component, "wandb", self._context, step)
        try:
            self._run = wandb.init(
                project=component.project,
                entity=component.entity or None,
                group=component.group or None,
                name=self._tracked.name,
                tags=component.tags or None,
                id=self._tracked.id,
                resume="allow" if component.mode == "online" else None,  # offline, `wandb sync` joins what has one id
                config=self._tracked.config(),
                dir=str(self._tracked.folder),
                mode=component.mode,
                reinit="create_new",  # another run of this process, perhaps of another logger, continues
                settings=self._settings(),
            )
        except wandb.Error as error:
            raise ForgeError(
                f"Weights & Biases did not take the run within {component.timeout_s:g} s: {error}; check base_url, "
                'project and the network, or set mode = "offline" and run `wandb sync` later'
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if component.mode == "offline":
            self._send_again(step)

    def _send_again(self, step: int) -> None:
        """Log the lines up to `step` that starts which were cut off may have lost."""
        # W&B's own process writes its file in blocks of 32 kB, and does not report which lines are written.
        first = self._tracked.cut_off
        if first is None:
            return
        try:
            metrics = read_metrics(self._tracked.folder)
        except ForgeError:  # no `[loggers.jsonl]`, or under another name
            message = f"Weights & Biases lacks lines after step {first}, as the run was killed, and it has no"
            warnings.warn(f"{message} metrics.jsonl to send them from", stacklevel=2)
            return
        tables = (metrics, metrics.evaluations)
        lost = [record for table in tables for record in table if first < record["step"] <= step]
        for record in sorted(lost, key=itemgetter("step")):
            self.log(record)

    def _settings(self) -> wandb.Settings:
        component = self._component
        server: dict[str, Any] = {"base_url": component.base_url} if component.base_url else {}
        return wandb.Settings(
            silent=True,
            console="off",  # rank logs contain the printed output, and a wrapped terminal breaks the progress line
            disable_code=True,  # provenance.json has it
            disable_git=True,
            init_timeout=component.timeout_s,
            x_disable_stats=not component.system,
            **server,
        )

    def log(self, record: Mapping[str, Any]) -> None:
        """Hand a line to W&B's own process, which writes it into a file and sends it."""
        if not is_sent(record, self._component.interval):
            return
        values: dict[str, Any] = {**numbers(record), "step": record["step"], "attempt": self._tracked.attempt}
        if self._tracked.takes_counts(record, self._component.counts_interval):
            for name, counts in count_rows(record).items():
                heights = np.array(counts, dtype=float)
                values[name] = wandb.Histogram(np_histogram=(heights, np.arange(len(heights) + 1)))  # a bar an expert
        self._run.log(values)

    def artifact(self, path: Path, name: str, step: int) -> None:
        """Put a copy among the run's files; a picture is also shown beside the curves."""
        target = Path(self._run.dir) / FILES / f"step-{step}" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        self._run.save(str(target), base_path=self._run.dir, policy="now")
        if target.suffix.lower() in PICTURES:
            try:
                shown = wandb.Image(str(target))
            except Exception as error:  # of pillow, which reads it
                warnings.warn(f"{name} is among the files of the run at W&B, but no picture: {error}", stacklevel=2)
                return
            self._run.log({f"files/{name}": shown, "step": step, "attempt": self._tracked.attempt})

    def end(self, code: int, reason: str) -> None:
        self._code = code
        self._run.summary["forge/exit_code"], self._run.summary["forge/ended"] = code, reason or "finished"
        if code == ExitCode.STOPPED:
            self._run.mark_preempting()  # with a nonzero code, W&B then shows preempted and not failed

    def close(self) -> None:
        """End the run at W&B. What it cannot send within `timeout_s` is in its folder."""
        # In a thread: while the server is away, W&B waits for it without end.
        # A daemon, as the process must be able to end meanwhile
        ending = threading.Thread(target=self._finish, daemon=True)
        ending.start()
        ending.join(self._component.timeout_s)
        if ending.is_alive():
            folder = Path(self._run.dir).parent
            warnings.warn(
                f"Weights & Biases did not take everything within {self._component.timeout_s:g} s; "
                f"`wandb sync {folder}` sends it",
                stacklevel=2,
            )

    def _finish(self) -> None:
        with suppress(Exception):  # the process ends first, and W&B's own with it
            self._run.finish(exit_code=int(self._code))
            self._tracked.ended()


def _refuse_missing_credentials(base_url: str) -> None:
    """Raise a `ForgeError` if there are none: W&B would ask on the terminal, and a batch job has none."""
    url = base_url or os.environ.get("WANDB_BASE_URL") or PUBLIC
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()  # where `wandb login` keeps the key
    known = netrc.netrc(path).hosts if path.exists() else {}
    if urlsplit(url).hostname not in known:
        advice = 'run `wandb login`, set WANDB_API_KEY, or set mode = "offline"'
        raise ForgeError(f"there are no credentials of Weights & Biases for {url}: {advice}")
