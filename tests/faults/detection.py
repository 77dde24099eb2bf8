"""Measures how soon a fault of a rank is found, and how soon all ranks have ended then.

    python tests/faults/detection.py                                    # every fault, of each of two ranks
    python tests/faults/detection.py --ranks 3 --fault frozen --start nproc -- --launch.silence_timeout_s=5

Faults: a rank is killed (SIGKILL), frozen (SIGSTOP), leaves out a collective (a deadlock), or its machine vanishes (its
network link goes down). Ranks are started by `--nproc`, by torchrun, or as plain processes with `RANK` and
`WORLD_SIZE`, as srun starts them. Found: seconds until a line on standard error names a cause. Ended: seconds from
there until all other ranks have ended, and with `--nproc` the launcher too. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from attrs import define, field

from forge_testing import TINY_JOB

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from networks import machines, reason_against

WARM_UP_STEPS = 40
LIMIT_S = 240.0
FAULTS = ("killed", "frozen", "deadlock", "vanished")
STARTS = ("nproc", "plain", "torchrun")

HOOK = '''
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import define
from forge_core import TrainingHook


@define(kw_only=True, slots=False)
class Steady(TrainingHook):
    """Each step takes 0.1 s and has an all-reduce, which one rank leaves out once a file says so."""

    def on_train_begin(self, context):
        self.group = dist.new_group()  # in one with others, the next collective would be taken for the one left out

    def on_step_end(self, context):
        time.sleep(0.1)
        if not Path(f"deadlock-{os.environ['RANK']}").exists():
            dist.all_reduce(torch.ones(1), group=self.group)
        Path(f"step-{os.environ['RANK']}").write_text(f"{context.step} {os.getpid()}")
'''


@define
class Trial:
    """One run with one fault."""

    start: str
    fault: str
    rank: int
    ranks: int
    overrides: Sequence[str]
    folder: Path
    lines: list[tuple[float, str]] = field(factory=list)
    processes: list[subprocess.Popen] = field(factory=list)

    def run(self) -> tuple[float | None, float | None, str]:
        """Seconds until the fault is found, from there until all have ended, and the first words of the message."""
        (self.folder / "job.toml").write_text(f'[job]\nname = "tiny"\n{TINY_JOB}[checkpoint]\ninterval = 0\n')
        (self.folder / "steady.py").write_text(HOOK)
        with ExitStack() as stack:
            stack.callback(self._clean_up)
            nets = stack.enter_context(machines()) if self.fault == "vanished" else None
            for number, (command, variables) in enumerate(self._commands()):
                inside = nets.inside(number) if nets else ()
                self._begin([*inside, *command], variables | (nets.environment(number) if nets else {}))
            self._warm_up()
            pids = [self._position(rank)[1] for rank in range(self.ranks)]
            began = time.time()
            if nets is not None:
                nets.vanish(self.rank)
            elif self.fault == "deadlock":
                (self.folder / f"deadlock-{self.rank}").touch()
            else:
                os.kill(pids[self.rank], signal.SIGSTOP if self.fault == "frozen" else signal.SIGKILL)
            return self._measure(began, pids)

    def _commands(self) -> Iterator[tuple[list[str], dict[str, str]]]:
        job = ["-m", "forge_core", "job.toml", "--train.steps=1000000", "--hooks.steady.type=./steady.py:Steady", "-q"]
        job += self.overrides
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        if self.start == "nproc":
            yield [sys.executable, *job, f"--nproc={self.ranks}"], {}
        elif self.start == "torchrun":
            launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={self.ranks}"]
            yield [*launcher, "--master-port", port, *job], {}
        else:
            shared = {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            for rank in range(self.ranks):
                yield [sys.executable, *job], shared | {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    def _begin(self, command: Sequence[str], variables: dict[str, str]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | variables
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=nothing, stderr=pipe, text=True, start_new_session=True
        )
        self.processes.append(process)
        threading.Thread(target=self._read, args=[process], daemon=True).start()

    def _read(self, process: subprocess.Popen) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.lines.append((time.time(), line.rstrip()))

    def _position(self, rank: int) -> tuple[int, int]:
        try:
            step, pid = (self.folder / f"step-{rank}").read_text().split()
            return int(step), int(pid)
        except (OSError, ValueError):
            return 0, 0

    def _warm_up(self) -> None:
        deadline = time.time() + LIMIT_S
        while min(self._position(rank)[0] for rank in range(self.ranks)) < WARM_UP_STEPS:
            assert time.time() < deadline, self.lines
            time.sleep(0.1)

    def _measure(self, began: float, pids: Sequence[int]) -> tuple[float | None, float | None, str]:
        # A frozen process ends only where somebody kills it, as `--nproc` does; a vanished one notices the same itself.
        stays = self.fault == "frozen" and self.start == "plain"
        awaited = [pid for rank, pid in enumerate(pids) if not (stays and rank == self.rank)]
        awaited += [process.pid for process in self.processes] if self.start != "plain" else []
        deadline, ended = began + LIMIT_S, {}
        while len(ended) < len(awaited) and time.time() < deadline:
            ended |= {pid: time.time() for pid in awaited if pid not in ended and not self._alive(pid)}
            time.sleep(0.02)
        others = [when for pid, when in ended.items() if pid != pids[self.rank]]
        words = [(when, line) for when, line in self.lines if when >= began and line.strip() and "W1" not in line[:3]]
        found = min([*others, *(when for when, _ in words)], default=None)
        last = max(ended.values()) if len(ended) == len(awaited) else None
        text = " / ".join(line for _, line in words if self.start != "torchrun" or "forge" in line)
        return found and found - began, last and found and last - found, text[:220]

    def _alive(self, pid: int) -> bool:
        for process in self.processes:
            process.poll()
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def _clean_up(self) -> None:
        pids = [self._position(rank)[1] for rank in range(self.ranks)]
        for pid in [*(process.pid for process in self.processes), *filter(None, pids)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def main() -> int:
    """Run one command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only this; may be repeated")
    parser.add_argument("--start", action="append", choices=STARTS, help="only this; may be repeated")
    parser.add_argument("--rank", action="append", type=int, help="only this one is hit; may be repeated")
    parser.add_argument("overrides", nargs="*", help="of the job, after --")
    options = parser.parse_args()
    print("| start | ranks | fault | rank | found after | all ended after that | first words |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for fault in options.fault or FAULTS:
        if fault == "vanished" and (reason := reason_against()):
            print(f"no vanishing machine: {reason}", file=sys.stderr)
            continue
        for start in options.start or STARTS:
            if fault == "vanished" and start != "plain":
                continue
            for rank in options.rank or range(options.ranks):
                with tempfile.TemporaryDirectory() as folder:
                    trial = Trial(start, fault, rank, options.ranks, options.overrides, Path(folder))
                    found, ended, words = trial.run()
                times = " | ".join("never" if seconds is None else f"{seconds:.1f} s" for seconds in (found, ended))
                print(f"| {start} | {options.ranks} | {fault} | {rank} | {times} | {words} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
