"""Checks of cores, memory and limits of this process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from forge_plugin_plan.doctor.results import Result, Surroundings, failed, ok, warning

CGROUP = Path("/sys/fs/cgroup")
GIB = 2**30
ENOUGH_FILES, FEW_FILES = 1024, 256
"""Open files that suffice for ranks and workers of one machine, and with which even one process may end."""
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def check_cores(surroundings: Surroundings) -> Iterator[Result]:
    """Cores that this process may use, the load on them, and settings of threads."""
    cores = usable_cores()
    share = quota(CGROUP / "cpu.max")
    seen = f"{cores} of {os.cpu_count()} usable"
    if share is not None and share < cores:
        mend = f"raise the limit of the container, or start threads for {max(1, int(share))} cores: OMP_NUM_THREADS"
        yield warning("cores", f"{seen}, but the cgroup allows the time of {share:g}", mend)
    else:
        yield ok("cores", seen)
    load = os.getloadavg()[0]
    if load > cores + 1:
        mend = "stop other programs, or expect slower steps and timings that mean little"
        yield warning("load", f"{load:.1f} on {cores} cores in the last minute", mend)
    else:
        yield ok("load", f"{load:.1f} on {cores} cores")
    yield _threads(surroundings.environment.get("OMP_NUM_THREADS"), cores)


def _threads(value: str | None, cores: int) -> Result:
    if not value:
        return ok("OMP_NUM_THREADS", "not set: torch takes every core")
    # OpenMP allows a list, with a number for each level of nested parallelism
    counts = value.split(",")
    if not all(count.strip().isdecimal() and int(count) > 0 for count in counts):
        return warning("OMP_NUM_THREADS", f"{value!r} is no number of threads and is ignored", "unset OMP_NUM_THREADS")
    if int(counts[0]) > cores:
        return warning("OMP_NUM_THREADS", f"{value} threads on {cores} cores", f"export OMP_NUM_THREADS={cores}")
    return ok("OMP_NUM_THREADS", value)


def check_bf16(surroundings: Surroundings) -> Iterator[Result]:
    """Whether the processor computes in bfloat16, where training would run on it."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return
    lines = path.read_text().splitlines()
    # `flags` on x86, `Features` on ARM
    flags = {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}
    if found := sorted(flags & BF16_FLAGS):
        yield ok("bfloat16", f"the processor has it ({', '.join(found)})")
    elif surroundings.ranks.facts().get("gpus"):
        yield ok("bfloat16", "the processor lacks it; GPUs have their own")
    else:
        mend = 'on this machine, train with train.precision = "fp32"'
        yield warning("bfloat16", "the processor lacks it, and torch emulates it slowly", mend)


def check_memory(_: Surroundings) -> Iterator[Result]:
    """Memory that is free, and what a cgroup leaves of it; shared memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = limit_in(CGROUP / "memory.max")
    seen = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if limit is not None and limit < total:
        used = limit_in(CGROUP / "memory.current") or 0
        free = min(free, limit - used)
        seen += f", the cgroup allows {limit / GIB:.1f} GiB, of which {max(0, limit - used) / GIB:.1f} are free"
    if free < 2 * GIB:
        yield warning("memory", seen, "stop other programs, or raise the limit of the container or of the job")
    else:
        yield ok("memory", seen)
    yield _shared_memory(Path("/dev/shm"))  # noqa: S108  # it is looked at, not written to


def _shared_memory(path: Path) -> Result:
    mend = "for a container: --shm-size=8g (docker), or an emptyDir of medium Memory at /dev/shm (Kubernetes)"
    if not path.is_dir():
        return warning("shared memory", f"there is no {path}, through which data workers send batches", mend)
    stat = os.statvfs(path)
    size, free = (blocks * stat.f_frsize for blocks in (stat.f_blocks, stat.f_bavail))
    seen = f"{free / GIB:.2f} of {size / GIB:.2f} GiB free in {path}"
    return warning("shared memory", seen, mend) if free < GIB // 2 else ok("shared memory", seen)


def check_limits(_: Surroundings) -> Iterator[Result]:
    """Limits that the shell has set on this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{_number(soft)} (up to {_number(hard)})"
    raised = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)
    mend = f"ulimit -n {raised}" if raised >= ENOUGH_FILES else "have `nofile` raised in /etc/security/limits.conf"
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        yield failed("open files", seen, mend)
    elif soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES:
        yield warning("open files", seen, mend)
    else:
        yield ok("open files", seen)
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if size != resource.RLIM_INFINITY:
        yield failed(
            "file size", f"files may have at most {size / 1e9:.2f} GB: saves would fail", "ulimit -f unlimited"
        )
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        mend = "ulimit -v unlimited: GPUs and memory maps take address space without taking memory"
        yield warning("address space", f"limited to {space / GIB:.1f} GiB", mend)


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(path: Path) -> float | None:
    """Returns the cores whose time a cgroup allows, by its `cpu.max`; None: no limit, or it cannot be read."""
    try:
        allowed, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if allowed == "max" else int(allowed) / int(period)


def limit_in(path: Path) -> int | None:
    """Returns the bytes in a file of a cgroup; None: no limit, or it cannot be read."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
