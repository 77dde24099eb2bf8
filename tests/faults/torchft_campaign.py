"""Groups of ranks under faults: python tests/faults/torchft_campaign.py [--ranks 2] [--groups 3] [--dead-after 1].

Starts a lighthouse and the groups by `forge-run`, and in turn kills a group, freezes one, and replaces the lighthouse.
Prints how long the others stood still at each fault, how many steps were left out, and whether the weights of all
groups are equal to the bit in the end. Exits with 1 if they are not, or a group does not end well. Needs psutil.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

JOB = """
[job]
name = "group"
[train]
steps = {steps}
global_batch_size = {batch}
seq_len = 8
[model]
type = "forge_testing:TinyModel"
[[data.sources]]
type = "forge_testing:Numbers"
[optimizer]
type = "forge_testing:TinyAdamW"
[checkpoint]
interval = 25
[hooks.pace]
type = "./pace.py:Pace"
[parallel.torchft]
groups = {groups}
lighthouse = "{lighthouse}"
timeout_s = {timeout}
{stages}
"""
PACE = """
import time
from itertools import pairwise
from attrs import define
from forge_core import TrainingHook

@define(kw_only=True, slots=False)
class Pace(TrainingHook):
    def on_step_begin(self, context):
        time.sleep(0.1)
"""
PORT = 29611


class Campaign:
    """The processes of a trial, in a folder of its own."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.failures = options, folder, 0
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        (folder / "pace.py").write_text(PACE)
        stages = "[parallel.fsdp]" if options.ranks > 1 else ""
        numbers = {
            "groups": options.groups,
            "timeout": float(options.timeout),
            "batch": 2 * options.groups * options.ranks,
        }
        job = JOB.format(steps=options.steps, lighthouse=f"http://127.0.0.1:{PORT}", stages=stages, **numbers)
        (folder / "job.toml").write_text(job)
        self.lighthouse = self.start_lighthouse()
        self.groups = {number: self.start(number) for number in range(options.groups)}

    def start_lighthouse(self) -> subprocess.Popen[bytes]:
        command = ["launch", "lighthouse", f"--port={PORT}", f"--dead-after={self.options.dead_after:g}"]
        return self.forge(command, "lighthouse")

    def start(self, number: int) -> subprocess.Popen[bytes]:
        names = [f"--job.name=group-{number}", f"--parallel.torchft.group={number}"]
        ranks = [f"--nproc={self.options.ranks}"] if self.options.ranks > 1 else []
        return self.forge(["job.toml", *names, *ranks], f"group-{number}")

    def forge(self, arguments: list[str], name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "forge_core", *arguments]
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def signal(self, number: int, what: signal.Signals) -> None:
        supervisor = psutil.Process(self.groups[number].pid)
        for process in (*supervisor.children(recursive=True), supervisor):  # ranks have process groups of their own
            process.send_signal(what)

    def lines(self, number: int) -> list[dict[str, Any]]:
        path = self.folder / "runs" / f"group-{number}" / "metrics.jsonl"
        texts = path.read_text().splitlines() if path.exists() else []
        records = [json.loads(text) for text in texts if text.endswith("}")]
        return [record for record in records if "loss" in record]

    def until(self, holds: Callable[[], bool], seconds: float = 240.0) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if holds():
                return True
            time.sleep(0.1)
        return False

    def present(self, count: int) -> bool:
        lines = self.lines(0)
        return bool(lines) and lines[-1]["participants"] == count

    def report(self, name: str, since: float) -> None:
        """What group 0 has seen since a fault."""
        self.until(lambda: bool(self.lines(0)) and self.lines(0)[-1]["time"] > time.time() - 2, 60)
        lines = self.lines(0)
        times = [line["time"] for line in lines if line["time"] > since - 1]
        longest = max((b - a for a, b in pairwise(times)), default=0.0)
        left_out = sum(line["time"] > since and not line["participants"] for line in lines)
        print(f"{name:45} longest step {longest:5.1f} s, steps left out {left_out}", flush=True)

    def run(self) -> int:
        all_of_them = self.options.groups
        self.check(self.until(lambda: self.present(all_of_them)), "all groups train")
        began = time.time()
        self.signal(1, signal.SIGKILL)
        self.check(self.until(lambda: self.present(all_of_them - 1)), "the others go on without a killed group")
        self.report("a group was killed", began)
        began = time.time()
        self.groups[1] = self.start(1)
        self.check(self.until(lambda: self.present(all_of_them)), "the killed group is back")
        self.report("it came back", began)
        began = time.time()
        self.signal(1, signal.SIGSTOP)
        self.check(self.until(lambda: self.present(all_of_them - 1)), "the others go on without a frozen group")
        self.report(f"a group was frozen, timeout_s = {self.options.timeout}", began)
        began = time.time()
        self.signal(1, signal.SIGCONT)
        self.check(self.until(lambda: self.present(all_of_them)), "the frozen group is back")
        self.report("it moved again", began)
        began = time.time()
        os.killpg(self.lighthouse.pid, signal.SIGKILL)
        time.sleep(3)
        self.lighthouse = self.start_lighthouse()
        at = len(self.lines(0))
        self.check(self.until(lambda: len(self.lines(0)) > at + 5), "groups go on with another lighthouse")
        self.report("the lighthouse was gone for 3 s", began)
        for number, process in self.groups.items():
            self.check(process.wait(600) == 0, f"group {number} ends well")
        self.check(len({self.digests(number) for number in self.groups}) == 1, "the weights are equal to the bit")
        os.killpg(self.lighthouse.pid, signal.SIGTERM)
        return min(1, self.failures)

    def digests(self, number: int) -> str:
        """The SHA-256 of the exported weights, without the notes of the file."""
        from safetensors.torch import load_file

        output = self.folder / f"{number}.safetensors"
        run = f"runs/group-{number}"
        self.forge(["checkpoints", run, "export", "--out", str(output)], "export").wait()
        if not output.exists():
            return f"none of {number}"
        digest = hashlib.sha256()
        for name, tensor in sorted(load_file(output).items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        return digest.hexdigest()

    def check(self, holds: bool, what: str) -> None:
        self.failures += not holds
        print(f"{'ok  ' if holds else 'FAIL'} {what}", flush=True)

    def close(self) -> None:
        for process in (self.lighthouse, *self.groups.values()):
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"groups": 3, "ranks": 1, "steps": 600, "timeout": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dead-after", type=float, default=1.0)
    parser.add_argument("--keep", action="store_true", help="keep the folder, and print it")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="torchft-"))
    campaign = Campaign(options, folder)
    try:
        return campaign.run()
    finally:
        campaign.close()
        if options.keep:
            print(folder)
        else:
            import shutil

            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
