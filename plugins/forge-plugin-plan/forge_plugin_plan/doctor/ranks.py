"""Checks of torch, devices and collectives in separate processes: a broken torch must not end the doctor."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from tempfile import TemporaryFile
from typing import IO, Any

from packaging.specifiers import SpecifierSet

from forge_plugin_plan.doctor.packages import tested_torch
from forge_plugin_plan.doctor.results import Result, Surroundings, failed, not_run, ok, warning

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SHOWN = 300
"""Characters of an error that are shown."""


class Ranks:
    """Processes that import torch and try collectives with each other while other checks run."""

    def __init__(self, count: int, limit_s: float) -> None:
        """Start `count` processes, which must end in `limit_s` seconds."""
        self.count, self.limit_s = count, limit_s
        self._deadline = time.monotonic() + limit_s
        # Free at this moment; if another program takes it before rank 0 does, the ranks report that
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        # Not the launcher's own variables: this is another world. One thread: there may be more ranks than cores.
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._outputs: list[IO[bytes]] = []
        self._lines: list[list[dict[str, Any]]] = []
        self._errors: list[str] = []
        for rank in range(count):
            # Files and not pipes: nobody reads while the other checks run.
            out, err = TemporaryFile(), TemporaryFile()  # noqa: SIM115  # `close` closes them
            command = [sys.executable, "-m", "forge_plugin_plan.doctor.rank", str(rank), str(count), str(port)]
            # In a separate session, so that `close` also ends what it has started
            process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
            self._processes.append(process)
            self._outputs += [out, err]

    def close(self) -> None:
        """End the processes that are still there."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for file in self._outputs:
            file.close()

    def lines(self) -> list[list[dict[str, Any]]]:
        """Returns what each rank printed, once all have ended, or their time is over."""
        if not self._lines:
            for process in self._processes:
                try:
                    process.wait(max(0.0, self._deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            texts = []
            for file in self._outputs:
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
            # Outputs and errors alternate
            self._lines = [_parsed(text) for text in texts[::2]]
            self._errors = texts[1::2]
        return self._lines

    def facts(self) -> dict[str, Any]:
        """Returns versions and devices as rank 0 saw them; empty if it did not come so far."""
        return next((line["facts"] for line in self.lines()[0] if "facts" in line), {})

    def trouble(self) -> list[str]:
        """Returns a line for each rank that did not finish: its last phase, and the end of its error."""
        lines = self.lines()
        troubles = []
        for rank, (entries, process) in enumerate(zip(lines, self._processes, strict=True)):
            phase = next((line["phase"] for line in reversed(entries) if "phase" in line), "starting Python")
            if phase == "done":
                continue
            # The last line of a traceback names the error
            error = self._errors[rank].strip().rpartition("\n")[2][:SHOWN]
            end = f"ended by signal {-process.returncode}" if process.returncode < 0 else f"exit {process.returncode}"
            troubles.append(f"rank {rank}, while {phase}: {error or end}")
        return troubles


def _parsed(text: str) -> list[dict[str, Any]]:
    entries = []
    for line in text.splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:  # a library's own message, or the line at which the process was killed
            continue
    return [entry for entry in entries if isinstance(entry, dict)]


def check_torch(surroundings: Surroundings) -> Iterator[Result]:
    """Whether torch can be imported and is one that the core was tested with."""
    ranks, facts = surroundings.ranks, surroundings.ranks.facts()
    if not facts:
        mend = "import it by hand, python -c 'import torch', and install it again: pip install --force-reinstall torch"
        yield failed("torch", "; ".join(ranks.trouble()) or "a process that imports it said nothing", mend)
        return
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"HIP {facts['hip']}" if facts["hip"] else "for the CPU"
    seen = f"{facts['torch']}, {build}"
    tested = tested_torch()
    # A torch newer than the tested versions is a warning, an older one a failure
    least = SpecifierSet(",".join(str(part) for part in tested if part.operator.startswith(">")))
    if tested.contains(facts["torch"], prereleases=True):
        yield ok("torch", seen)
    elif least.contains(facts["torch"], prereleases=True):
        yield warning(
            "torch", f"{seen}; this version of Forge was tested with {tested} only", f"pip install 'torch{tested}'"
        )
    else:
        yield failed("torch", seen, f"pip install --upgrade 'torch{tested}'")


def check_devices(surroundings: Surroundings) -> Iterator[Result]:
    """GPUs as torch and the driver see them, and whether every device multiplies right."""
    facts = surroundings.ranks.facts()
    if not facts:
        yield not_run("devices", "torch could not be imported")
        return
    yield _gpus(facts, surroundings)
    for entry in surroundings.ranks.lines()[0]:
        if device := entry.get("device"):
            yield _product(device)


def _gpus(facts: dict[str, Any], surroundings: Surroundings) -> Result:
    driver = driver_gpus(surroundings.environment.get("PATH"))
    seen = f"{len(facts['gpus'])}: {'; '.join(dict.fromkeys(facts['gpus']))}" if facts["gpus"] else "none"
    if len(driver) > len(facts["gpus"]):
        why = "this torch is built for the CPU" if not (facts["cuda"] or facts["hip"]) else "CUDA_VISIBLE_DEVICES, or"
        mend = f"{why} the driver is older than torch's CUDA: see pytorch.org/get-started for the right build"
        if not facts["cuda"]:
            mend = f"{why}: install a build with CUDA, see pytorch.org/get-started"
        return warning("GPUs", f"torch sees {seen}, the driver {len(driver)}: {driver[0]}", mend)
    extra = f", driver {driver[0].rpartition(', ')[2]}" if driver else ""
    return ok("GPUs", f"{seen}{extra}" + (f", NCCL {facts['nccl']}" if facts["nccl"] else ""))


def driver_gpus(path: str | None) -> list[str]:
    """Returns a line for each GPU that nvidia-smi lists: name and driver; none without nvidia-smi."""
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return []
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    # A driver that hangs must not hold up the other checks
    except subprocess.TimeoutExpired:
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _product(device: dict[str, Any]) -> Result:
    name, speed = f"{device['device']}: products", f"{device['tflops']:,.3g} TFLOP/s in {device['dtype']}"
    if device["right"]:
        threads = ", one thread" if device["device"] == "cpu" else ""
        return ok(name, f"exact in {' and '.join(device['exact'])}; {speed}{threads}")
    mend = "do not train on this device: have it replaced, or lower its clock"
    return failed(name, f"a product of whole numbers is wrong; {speed}", mend)


def check_collectives(surroundings: Surroundings) -> Iterator[Result]:
    """Whether ranks of this machine meet, and what they compute together is right; latency and bandwidth."""
    ranks = surroundings.ranks
    if not ranks.facts():
        yield not_run("collectives", "torch could not be imported")
        return
    found: dict[str, list[dict[str, Any]]] = {}
    for entries in ranks.lines():
        for entry in entries:
            if collective := entry.get("collective"):
                found.setdefault(f"{collective['backend']}: {collective['name']}", []).append(collective)
    for name, of_ranks in found.items():
        yield collective_result(name, of_ranks, ranks.count)
    if trouble := ranks.trouble():
        mend = "see above for the first that failed; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME choose the interface"
        late = f" within {ranks.limit_s:g} s"
        yield failed("ranks", f"{len(trouble)} of {ranks.count} did not finish{late}: {'; '.join(trouble)}", mend)


def collective_result(name: str, of_ranks: list[dict[str, Any]], count: int) -> Result:
    """Returns the result of one collective, from what each rank found: see `rank.tried`."""
    wrong = [f"rank {rank}: {one['wrong']}" for rank, one in enumerate(of_ranks) if not one["right"]]
    if wrong:
        mend = "do not train on several ranks here: try another interface (GLOO_SOCKET_IFNAME), driver or torch"
        return failed(name, "; ".join(wrong), mend)
    if len(of_ranks) < count:
        return not_run(name, f"only {len(of_ranks)} of {count} ranks came to its end")
    # The slowest rank counts, as the others wait for it
    latency = max(one["latency_s"] for one in of_ranks)
    bandwidth = min(one["bandwidth"] for one in of_ranks)
    return ok(name, f"right on {count} ranks; 4 kB in {1e6 * latency:,.0f} µs, 16 MiB at {bandwidth / 1e9:,.2f} GB/s")
