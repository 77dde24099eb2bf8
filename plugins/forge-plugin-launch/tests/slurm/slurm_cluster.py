"""A real SLURM cluster of several nodes on this machine, for tests: its own munge, controller and node daemons.

python slurm_cluster.py FOLDER    # starts one, prints its SLURM_CONF, and stops it when standard input ends

Partition `low` (the default) is preempted by `high`: SIGTERM, `GRACE_S`, and then SLURM queues the job again.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
GRACE_S = 8
KILL_WAIT_S = 8
NODE_TIMEOUT_S = 4
PATIENCE_S = 120.0
SBIN = "/usr/sbin:/usr/local/sbin"


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    path = f"{os.environ['PATH']}:{SBIN}"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"no {', '.join(absent)} on this machine: Debian has them in slurm-wlm and munge"
    return ""


class SlurmCluster:
    """A cluster whose files are in `folder`."""

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 2) -> None:
        self.folder, self.nodes = folder, [f"node{number}" for number in range(1, nodes + 1)]
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))
        }
        self.environment |= {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:{SBIN}",
            "MASTER_ADDR": "127.0.0.1",  # the nodes are names of one machine, which no resolver knows
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
        }
        self._restarts: dict[str, int] = {}
        self._configure(cpus)

    def _configure(self, cpus: int) -> None:
        for name in ("state", "spool", "log"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        host, user, ports = socket.gethostname().split(".")[0], getpass.getuser(), _free_ports(len(self.nodes) + 1)
        log, run = self.folder / "log", self.folder
        settings = {
            "ClusterName": "forge",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": ports[0],
            "SlurmUser": user,
            "SlurmdUser": user,
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            "AuthInfo": f"socket={run}/munge.socket",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SwitchType": "switch/none",
            "MpiDefault": "none",
            "ReturnToService": 2,
            "SlurmdParameters": "config_overrides",  # nodes have the cores that this file says
            "StateSaveLocation": run / "state",
            "SlurmdSpoolDir": run / "spool" / "%n",
            "SlurmctldPidFile": run / "slurmctld.pid",
            "SlurmdPidFile": run / "slurmd-%n.pid",
            "SlurmctldLogFile": log / "slurmctld.log",
            "SlurmdLogFile": log / "slurmd-%n.log",
            "SchedulerParameters": "sched_interval=1,bf_interval=1,sched_min_interval=100000,batch_sched_delay=0",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "JobRequeue": 1,
            "KillWait": KILL_WAIT_S,
            "SlurmdTimeout": NODE_TIMEOUT_S,
            "MessageTimeout": 5,
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        for node, port in zip(self.nodes, ports[1:], strict=True):
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} State=UNKNOWN"
            )
        low = f"PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S}"
        lines.append(f"PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP {low}")
        lines.append("PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF")
        (self.folder / "slurm.conf").write_text("\n".join([*lines, ""]))

    def start(self) -> None:
        run = self.folder
        munge = ("--key-file", "munge.key"), ("--socket", "munge.socket"), ("--pid-file", "munged.pid")
        files = [f"{option}={run / name}" for option, name in (*munge, ("--log-file", "log/munged.log"))]
        self._do("munged", "--force", *files, f"--seed-file={run / 'munge.seed'}")
        self._do("slurmctld")
        for node in self.nodes:
            self.start_node(node)
        self.until(lambda: self.node_states().count("idle") == len(self.nodes), "all nodes are idle")

    def start_node(self, node: str, again: bool = False) -> None:
        self._do("slurmd", "-N", node)
        if again:
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)

    def kill_node(self, node: str, noticed: bool = False) -> None:
        """End all that runs on a node, without a word: its daemon, the steps, and what they have started.

        `noticed`: the controller finds out at once, and not by its own pings, which takes a quarter of a minute.
        """
        daemon = int((self.folder / f"slurmd-{node}.pid").read_text())
        # Parents first: a slurmstepd that outlives its task for a moment reports an exit, and no node has failed
        for pid in [daemon, *_below(*self._steps_of(node))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if noticed:
            self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")

    def rank(self, job: str, rank: int) -> int:
        """The process of a rank of a job."""
        wanted = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode()}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                variables = path.read_bytes().split(b"\0")
                if (
                    wanted <= set(variables)
                    and self._is_ours(path)
                    and b"forge_core" in (path.parent / "cmdline").read_bytes()
                ):
                    return int(path.parent.name)
        raise AssertionError(f"job {job} has no rank {rank}")

    def _steps_of(self, node: str) -> list[int]:
        """The processes of slurmstepd on a node, by the variables of their tasks."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"SLURMD_NODENAME={node}\0".encode() in path.read_bytes() and self._is_ours(path):
                    found.append(_step_of(int(path.parent.name)))
        return found

    def _is_ours(self, environ: Path) -> bool:
        return f"SLURM_CONF={self.folder / 'slurm.conf'}\0".encode() in environ.read_bytes()

    def stop(self) -> None:
        self.run("scancel", "--user", getpass.getuser(), check=False)
        with contextlib.suppress(AssertionError):
            self.until(lambda: not self.run("squeue", "--noheader"), "the queue is empty", 20)
        for file in [*self.folder.glob("slurmd-*.pid"), self.folder / "slurmctld.pid", self.folder / "munged.pid"]:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(file.read_text()), signal.SIGTERM)

    def _do(self, *command: str) -> None:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.stderr}")

    # --- what a person would do ----------------------------------------------------------------------------------

    def run(self, *command: str, cwd: Path | None = None, check: bool = True) -> str:
        done = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def node_states(self) -> list[str]:
        return self.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T").split()

    def state(self, job: str) -> str:
        """State and reason of a job: `PENDING BeginTime`."""
        facts = self.facts(job)
        return f"{facts.get('JobState', '')} {facts.get('Reason', '')}"

    def facts(self, job: str) -> dict[str, str]:
        """Fields of a job; empty once the controller has forgotten it."""
        for _ in range(10):
            text = self.run("scontrol", "show", "job", "-o", job, check=False)
            if text:
                return dict(re.findall(r"(\w+)=(\S*)", text))
            time.sleep(0.5)  # a busy machine: the controller has not answered
        return {}

    def preempt(self, job: str) -> None:
        """Have a job of the partition `high` take all nodes for a moment; `job` has been told when this returns."""
        options = ("--partition=high", f"--nodes={len(self.nodes)}", "--exclusive", "--output=/dev/null")
        self.run("sbatch", *options, "--wrap=true")
        self.until(
            lambda: self.facts(job).get("PreemptTime", "None") != "None" or not self.state(job).startswith("RUNNING"),
            "preemption",
        )

    def hasten(self, job: str) -> None:
        """Start a job at once that was queued again: SLURM waits two minutes, in case the nodes are at fault."""
        before = self._restarts.get(job, 0)

        def queued_again() -> bool:
            facts = self.facts(job)
            return int(facts.get("Restarts", 0)) > before and facts["JobState"] == "PENDING"

        self.until(queued_again, f"job {job} is queued again")
        self._restarts[job] = before + 1
        time.sleep(1.2)  # credentials of the same second count as revoked, and the job would fail
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def until(self, holds: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}\n{self.run('squeue', check=False)}"
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _parents() -> dict[int, int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return parents


def _below(*pids: int) -> list[int]:
    """Processes and all that they have started."""
    parents, found = _parents(), list(dict.fromkeys(pids))
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid and child not in found]
    return found


def _step_of(pid: int) -> int:
    """The slurmstepd above a process; the process itself if that has gone, so that nothing else is ever hit."""
    parents, above = _parents(), pid
    while above > 1:
        with contextlib.suppress(OSError):
            if "slurmstepd" in Path(f"/proc/{above}/comm").read_text():
                return above
        above = parents.get(above, 0)
    return pid


def main() -> None:
    if reason := missing():
        sys.exit(reason)
    cluster = SlurmCluster(Path(sys.argv[1]).resolve())
    try:
        cluster.start()
        print(f"SLURM_CONF={cluster.folder / 'slurm.conf'}", flush=True)
        sys.stdin.read()
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
