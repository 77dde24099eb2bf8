"""Preempts runs on a real SLURM at many moments, and compares their curves with an uninterrupted run, to the bit.

python tests/faults/slurm_campaign.py [--preemptions 50] [--minutes 60] [--seed 0]

Moments in turn: at any time; while it starts; in the middle of a step; in a save; in the last step. Every third run has
two ranks on two nodes. Each run is preempted five times. Prints a line for each run; exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "plugins/forge-plugin-launch/tests"))

from slurm_cluster import SlurmCluster, missing

from forge_plugin_launch.slurm.records import read_attempts
from forge_testing.tiny import TINY_JOB

STEPS = 120
JOB = f"""{TINY_JOB.replace("steps = 4", f"steps = {STEPS}")}
[job]
name = "run"
[checkpoint]
interval = 16
[hooks.hold]
type = "./hold.py:Hold"
"""
HOLD = """
import time
from pathlib import Path
from forge_core import TrainingHook

class Hold(TrainingHook):
    '''Holds the run where the file `stay` says, until that file has gone.'''

    def on_step_end(self, context):
        time.sleep(0.05)
        self.hold(f"step {context.step}")

    def state_dict(self):
        self.hold("save")
        return {}

    def hold(self, place):
        stay = Path("stay")
        while stay.exists() and stay.read_text() == place:
            Path("there").touch()
            time.sleep(0.02)
"""
IN_ALL = 5
"""Preemptions of one run."""


class Campaign:
    """One cluster, and runs on it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.cluster = SlurmCluster(folder / "slurm")
        self.moments: Counter[str] = Counter()

    def run(self, number: int, ranks: int) -> str:
        """One run to its end; returns what is wrong, or nothing."""
        work = self.folder / f"run-{number}"
        work.mkdir()
        (work / "job.toml").write_text(JOB)
        (work / "hold.py").write_text(HOLD)
        out = self.cluster.run("forge-run", "submit", "job.toml", f"--nodes={ranks}", cwd=work)
        job = re.search(r"job (\d+)", out)[1]  # type: ignore[index]
        early = self.random.sample([self.any_time, self.start, self.middle, self.save] * 2, IN_ALL - 1)
        for moment in [*early, self.last]:
            if self.finished(work):
                break
            self.cluster.until(lambda: self.finished(work) or self.running(job), "it runs")
            moment(work, job)
            if not self.finished(work):
                self.moments[moment.__name__] += 1
                self.cluster.hasten(job)
        self.cluster.until(lambda: self.finished(work), "it is finished")
        return self.judge(work, ranks, job)

    def judge(self, work: Path, ranks: int, job: str) -> str:
        attempts = read_attempts(work / "runs/run")
        kinds = [each.kind for each in attempts]
        if kinds != ["preempted"] * (len(attempts) - 1) + ["finished"]:
            return f"attempts ended as {kinds}"
        if [each.restart for each in attempts] != list(range(len(attempts))) or {each.job for each in attempts} != {
            job
        }:
            return "an attempt is missing"
        if any(each.step_ended != each.saved for each in attempts if each.code == os.EX_TEMPFAIL and each.saved):
            return "steps were lost though the run ended in order"
        return "" if losses(work / "runs/run") == self.reference(ranks) else "its losses differ"

    def reference(self, ranks: int) -> list[tuple[int, float]]:
        work = self.folder / f"reference-{ranks}"
        if not work.exists():
            work.mkdir()
            (work / "job.toml").write_text(JOB)
            (work / "hold.py").write_text(HOLD)
            self.cluster.run("forge-run", "job.toml", f"--nproc={ranks}", "--quiet", cwd=work)
        return losses(work / "runs/run")

    # --- moments ---------------------------------------------------------------------------------------------------

    def any_time(self, work: Path, job: str) -> None:
        self.after(self.random.uniform(0, 8), work, job)

    def start(self, work: Path, job: str) -> None:
        self.after(self.random.uniform(0, 3), work, job)

    def middle(self, work: Path, job: str) -> None:
        reached = json.loads(lines[-1])["step"] if (lines := metrics(work / "runs/run")) else 0
        self.held(f"step {min(reached + self.random.randint(1, STEPS // IN_ALL), STEPS)}", work, job)

    def save(self, work: Path, job: str) -> None:
        self.held("save", work, job)

    def last(self, work: Path, job: str) -> None:
        self.held(f"step {STEPS}", work, job)

    def after(self, seconds: float, work: Path, job: str) -> None:
        """Preempt after some time, whatever the run does then."""
        time.sleep(seconds)
        if not self.finished(work):
            self.preempt(work, job)

    def held(self, place: str, work: Path, job: str) -> None:
        """Preempt while the run is at a place."""
        (work / "there").unlink(missing_ok=True)
        (work / "stay").write_text(place)
        self.cluster.until(lambda: (work / "there").exists() or self.finished(work), place)
        if not self.finished(work):
            self.preempt(work, job, lambda: (work / "stay").unlink())
        (work / "stay").unlink(missing_ok=True)

    def preempt(self, work: Path, job: str, release: Callable[[], object] = lambda: None) -> None:
        before = len(read_attempts(work / "runs/run"))
        self.cluster.preempt(job)
        time.sleep(0.1)
        release()
        self.cluster.until(lambda: len(read_attempts(work / "runs/run")) > before, "the end is noted")

    def running(self, job: str) -> bool:
        return self.cluster.state(job).startswith("RUNNING")

    def finished(self, work: Path) -> bool:
        attempts = read_attempts(work / "runs/run")
        return bool(attempts) and attempts[-1].kind not in ("preempted", "node")


def metrics(run: Path) -> list[str]:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [line for line in lines if '"loss"' in line and line.endswith("}")]


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in map(json.loads, metrics(run))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preemptions", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    wrong, began, runs = 0, time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), options.seed)
        try:
            campaign.cluster.start()
            while campaign.moments.total() < options.preemptions and time.monotonic() - began < 60 * options.minutes:
                runs += 1
                ranks = 2 if runs % 3 == 0 else 1
                try:
                    problem = campaign.run(runs, ranks)
                except AssertionError as error:
                    problem = str(error)
                wrong += bool(problem)
                print(
                    f"run {runs}, {ranks} ranks: {problem or 'equal'}; {campaign.moments.total()} preemptions",
                    flush=True,
                )
                if problem:
                    logs = sorted((Path(folder) / f"run-{runs}").glob("runs/run/slurm/*.log"))
                    subprocess.run(
                        ["tail", "-n", "60", *logs, Path(folder) / f"run-{runs}/runs/run/attempts.jsonl"], check=False
                    )
        finally:
            campaign.cluster.stop()
    minutes = (time.monotonic() - began) / 60
    moments = ", ".join(f"{name} {count}" for name, count in sorted(campaign.moments.items()))
    print(f"{campaign.moments.total()} preemptions ({moments}) of {runs} runs in {minutes:.0f} min: {wrong} runs wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
