"""A few steps of the chosen training, in a separate process, to measure how fast this machine really is."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from forge_core.contracts.errors import JobError
from forge_kit.tools.run_owner import metrics_file
from forge_plugin_plan.init.sizes import Machine, Sizes, flops_per_token

LIMIT_S = 120.0
SKIPPED, TIMED = 2, 6
"""Steps that warm up, and those that count."""
TOKENS = 16_384
"""Tokens of a step of the trial at most: longer steps take proportionally longer."""

JOB = """
[job]
name = "trial"
output = {folder}
[train]
steps = 1000000
global_batch_size = {batch}
seq_len = {seq_len}
precision = "{precision}"
dry_run = "never"
[model]
type = "transformer"
dim = {dim}
layers = {layers}
vocab_size = {vocab_size}
tie_embeddings = true
[model.attention]
heads = {layers}
qk_norm = true
[data.tokenizer]
type = "bytes"
[[data.sources]]
type = "text"
path = {text}
[loss]
type = "chunked_cross_entropy"
[optimizer]
type = "adamw"
[checkpoint]
interval = 0
[loggers.console]
style = "off"
"""


def efficiency(sizes: Sizes, vocab_size: int, machine: Machine) -> float:
    """Returns the share of the machine's speed that steps of this training reach now, other programs included.

    Raises:
        JobError: the training cannot run here; has the last line of its error.
    """
    # With gradient accumulation, one micro-batch stands for the whole step
    batch = sizes.micro_batch_size or min(sizes.global_batch_size, max(1, TOKENS // sizes.seq_len))
    with tempfile.TemporaryDirectory(prefix="forge-init-") as folder:
        text = Path(folder, "text.txt")
        generator = random.Random(0)  # noqa: S311  # any text does
        text.write_text("".join(generator.choices("etaoin shrdlu", k=4 * batch * sizes.seq_len)), encoding="utf-8")
        job = Path(folder, "trial.toml")
        values = {
            "dim": sizes.dim,
            "layers": sizes.layers,
            "seq_len": sizes.seq_len,
            "vocab_size": max(vocab_size, 257),
        }
        paths = {"folder": json.dumps(folder), "text": json.dumps(str(text))}
        job.write_text(JOB.format(batch=batch, precision=machine.precision, **values, **paths), encoding="utf-8")
        seconds = _step_seconds(job, Path(folder))
    cost = flops_per_token(sizes.parameters, sizes.layers, sizes.dim, sizes.seq_len)
    return cost * batch * sizes.seq_len / (seconds * machine.flops)


def _step_seconds(job: Path, folder: Path) -> float:
    """Run a job until some steps are done, then end it: its checkpoint would take longer than all of them."""
    output = folder / "output.txt"
    # A cache that is removed too: nothing of the trial is of use later.
    environment = os.environ | {"FORGE_CACHE": str(folder / "cache")}
    with output.open("wb") as file:
        command = [sys.executable, "-m", "forge_core", "run", str(job)]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        try:
            seconds = _wait_for_steps(process, metrics_file(folder / "trial"))
        finally:
            if process.poll() is None:
                # The whole process group, as the run may have child processes
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not seconds:
        last = output.read_text(errors="replace").strip().rpartition("\n")[2] or f"no step in {LIMIT_S:g} s"
        raise JobError(f"a trial of the chosen sizes does not run here: {last}; give --time or --parameters for less")
    return statistics.median(seconds)


def _wait_for_steps(process: subprocess.Popen[bytes], metrics: Path) -> list[float]:
    """Returns the seconds of the steps that count: all of them, or as many as there are at the time limit."""
    end = time.monotonic() + LIMIT_S
    while True:
        # The file is polled, as the run has no other connection to this process
        # Whole lines: the last one may be on its way
        lines = metrics.read_text().rpartition("\n")[0].splitlines() if metrics.is_file() else []
        over = process.poll() is not None or time.monotonic() > end
        if len(lines) >= SKIPPED + TIMED or over:
            return [float(json.loads(line)["step_seconds"]) for line in lines[SKIPPED : SKIPPED + TIMED]]
        time.sleep(0.1)
