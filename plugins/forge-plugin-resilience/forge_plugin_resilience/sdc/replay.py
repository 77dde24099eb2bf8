"""The command `replay`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import tomli_w

from forge_core import ForgeError, JobError
from forge_core.checkpoint.run_folder import JOB, TOKENIZER, RunFolder, refuse_file, storage_of
from forge_core.checkpoint.storage import Local, read_manifest
from forge_core.cli.command_line import positive, with_examples
from forge_core.contracts.runtime import SpreadStorage
from forge_core.launch.world import join_world
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.metrics import read_metrics
from forge_kit.tools.output_schema import COUNT, NUMBER, TEXT, Schema, array, keyed, maybe
from forge_kit.tools.outputs import new_folder
from forge_kit.tools.ranks import ranks_asked_for
from forge_plugin_resilience.sdc.faults import Record
from forge_plugin_resilience.sdc.verdict import Replay

NEVER = 2**31


HEADING = "keep"


def command(argv: list[str]) -> int:
    """Compute a step of a run again, and compare it with the record.

    The sequences of the step with the highest loss are shown as text.
    """
    parser = argparse.ArgumentParser("forge-run replay", description=command.__doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run folder; nothing is written into it")
    add("--step", type=positive, required=True, metavar="N", help="the step, from 1")
    add("--digest", action="store_true", help="also compute and print the digest of the gradients of each rank")
    add("--worst", type=positive, default=10, metavar="K", help="sequences to show (10)")
    add("--nproc", type=positive, metavar="N", help="start N ranks on this machine, as the run had them (1)")
    add("--from", type=Path, metavar="DIR", dest="base", help="where relative paths of its job start, if the run was "
        "moved (the working directory of its start)")  # fmt: skip
    add("--scratch", type=Path, metavar="DIR", help="folder for the files of the replay, which all ranks reach "
        "(a temporary one)")  # fmt: skip
    add_json(parser)
    with_examples(
        parser, "forge-run replay runs/quickstart --step 120", "forge-run replay runs/big --step 9000 --nproc 8"
    )
    options = parser.parse_args(argv)
    ranks_asked_for(options.nproc)
    world = join_world()
    if not world.alone and options.scratch is None:
        raise JobError("ranks of torchrun or srun need one folder for all of them: --scratch DIR")
    if options.scratch is not None and world.rank == 0:
        options.scratch = new_folder(options.scratch, "--scratch")
    refuse_file(options.run)
    run = options.run.resolve()
    if not (run / JOB).is_file():
        raise JobError(f"{options.run} is no run folder: it has no {JOB}")
    recorded = recorded_rows(run, options.step)
    with nullcontext(options.scratch) if options.scratch else tempfile.TemporaryDirectory() as scratch:
        result = _compute(options, run, Path(scratch).resolve(), world.rank)
    if world.rank == 0:
        again = {row["step"]: (row["loss"], row["grad_norm"]) for row in result.pop("rows")}
        digests = Record(run).gradients(options.step)
        replay = Replay(step=options.step, recorded=recorded, again=again, recorded_gradients=digests, **result)
        if options.json:
            print_json({"run": options.run, **replay.facts()})
        else:
            print(replay.report(options.digest))
    return 0


def recorded_rows(run: Path, step: int) -> Mapping[int, tuple[float, float]]:
    """Loss and gradient norm of each recorded step up to `step`.

    Raises:
        ForgeError: the run has recorded no such step.
    """
    rows = {row["step"]: (row["loss"], row["grad_norm"]) for row in read_metrics(run)}
    if step not in rows:
        last = f"; its last is {max(rows)}" if rows else ""
        raise ForgeError(f"{run} has no record of step {step}{last}")
    return {number: row for number, row in rows.items() if number <= step}


def _compute(options: argparse.Namespace, run: Path, scratch: Path, rank: int) -> dict[str, Any]:
    """Train from the checkpoint before the step up to it, in a separate folder; returns what `Replayed` wrote."""
    storage = storage_of(run)
    steps = sorted(storage.steps())
    before = [step for step in steps if step < options.step]
    # The job as the step was trained with it: a run may have been continued with another one later.
    later = [step for step in steps if step >= options.step]
    text = read_manifest(storage.path(later[0]))["job"] if later else (run / JOB).read_text(encoding="utf-8")
    result = scratch / "replayed.json"
    if rank == 0:
        (scratch / "replay").mkdir(parents=True, exist_ok=True)
        result.unlink(missing_ok=True)
        (scratch / JOB).write_text(tomli_w.dumps(replay_job(tomllib.loads(text), options, result)), encoding="utf-8")
        if (run / TOKENIZER).is_dir() and not (scratch / "replay" / TOKENIZER).exists():
            (scratch / "replay" / TOKENIZER).symlink_to(run / TOKENIZER)
    arguments = [str(scratch / JOB), "--quiet"]
    if before:
        # In a bucket, or in memory of machines, a checkpoint has no folder until it is fetched: then by its name
        named = run / Local().folder / f"step-{before[-1]}"
        start = named if isinstance(storage, SpreadStorage) else storage.path(before[-1])
        arguments += ["--resume", str(start)]
    arguments += [f"--nproc={options.nproc}"] if options.nproc else []
    # A separate process, which exits at the step: no save, and no hook of the job is notified of an end.
    child = [sys.executable, "-m", "forge_core", "run", *arguments]
    base = options.base or _started_in(run)
    # In the working directory of the run's start, from which relative paths of its job lead to its data
    done = subprocess.run(child, cwd=base, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if not result.is_file() and rank == 0:
        raise ForgeError(f"step {options.step} could not be computed again:\n{done.stderr.strip()}")
    return json.loads(result.read_text()) if rank == 0 else {}


def replay_job(job: dict[str, Any], options: argparse.Namespace, result: Path) -> dict[str, Any]:
    """The job of a run, to be trained in the folder of `result` and to end at the step."""
    job["job"] = {**job.get("job", {}), "output": str(result.parent), "name": "replay"}
    # Not the run's storage: the replay must neither save into it nor delete from it
    kept = ("load", "verify")
    job["checkpoint"] = {key: value for key, value in job.get("checkpoint", {}).items() if key in kept}
    job["checkpoint"] |= {"interval": 0, "interval_minutes": 0.0}
    # Other loggers may write to a service, as if the run had gone back
    job["loggers"] = {"console": {"type": "forge-run/console", "style": "off"}}
    own = "forge-plugin-resilience/replicas"
    hooks = {name: table for name, table in job.get("hooks", {}).items() if table.get("type", name) != own}
    replayed = {"type": "forge_plugin_resilience.sdc.replay_hook:Replayed", "at": options.step, "worst": options.worst}
    job["hooks"] = {**hooks, "replayed": {**replayed, "file": str(result)}}
    plugins = job.setdefault("plugins", {})
    checks = [table for name, table in plugins.items() if table.get("type", name) == "forge-plugin-resilience/sdc"]
    if not checks and options.digest:
        checks = [plugins.setdefault("sdc", {"type": "forge-plugin-resilience/sdc"})]
    for table in checks:
        table["every"] = NEVER  # the step alone is checked, by the hook's request
    return job


def _started_in(run: Path) -> Path | None:
    try:
        folder = RunFolder(run).provenance()["started_in"]
    except (OSError, ValueError, KeyError):
        return None
    return Path(folder) if os.path.isdir(folder) else None


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    computed = keyed(loss=NUMBER, grad_norm=maybe(NUMBER), gradients=array(TEXT))
    replayed = keyed(
        run=TEXT,
        step=COUNT,
        recorded=computed,
        again=computed,
        cause={"enum": ["hardware", "data", "weights", None]},
        verdict=TEXT,
        sequences=COUNT,
        worst=array(keyed(loss=NUMBER, source=TEXT, text=TEXT)),
    )
    return {"": replayed}
