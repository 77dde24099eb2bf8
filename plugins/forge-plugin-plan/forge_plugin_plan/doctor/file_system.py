"""Checks of the file systems of the output and of the cache, in folders that are removed again."""

from __future__ import annotations

import fcntl
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forge_plugin_plan.doctor.results import Result, Surroundings, failed, ok, warning

SIZE = 32 * 2**20
"""Bytes that are written to measure the speed."""
SKEW_S = 2.0
SLOW_SYNC_S = 0.5
SLOW_MBS = 20.0
TRY_LOCK = """
import fcntl, sys
with open(sys.argv[1]) as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("refused")
    else:
        print("taken")
"""


def check_output(surroundings: Surroundings) -> Iterator[Result]:
    """The file system of run folders: everything that checkpoints and run folders rely on."""
    folder = surroundings.output.expanduser().absolute()
    if blocking := next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None):
        yield failed("output", f"{blocking} is a file, not a folder", "choose another folder: job.output")
        return
    yield from _check_folder("output", surroundings.output)


def check_cache(surroundings: Surroundings) -> Iterator[Result]:
    """The file system of the cache, if it is another one."""
    place, other = existing(surroundings.cache), existing(surroundings.output)
    if os.stat(place).st_dev != os.stat(other).st_dev:
        yield from _check_folder("cache", surroundings.cache)
        return
    try:
        with _trial_folder(place):
            yield ok("cache", f"{surroundings.cache}, on the file system of the output")
    except OSError as error:
        yield _unwritable("cache", place, error)


def _check_folder(name: str, folder: Path) -> Iterator[Result]:
    place = existing(folder)
    try:
        with _trial_folder(place) as trial:
            where = f"{folder}" if place == folder else f"{folder} (not there yet; tried in {place})"
            yield ok(name, f"{where}, {file_system_of(place)}")
            yield _space(f"{name}: space", place)
            for title, check in CHECKS.items():
                yield guarded(f"{name}: {title}", trial, check)
    except OSError as error:
        yield _unwritable(name, place, error)


def guarded(name: str, trial: Path, check: Callable[[str, Path], Result]) -> Result:
    """Run one of `CHECKS` in a folder; what the file system does not do at all is a failure, too."""
    try:
        return check(name, trial)
    except OSError as error:
        return failed(name, f"{type(error).__name__}: {error}", OTHER_FOLDER)


OTHER_FOLDER = "choose a folder on another file system: job.output for runs, FORGE_CACHE for the cache"
"""How to fix what a file system does not do."""


def _unwritable(name: str, place: Path, error: OSError) -> Result:
    mend = f"make it writable for this user, or choose another folder: {_CHOOSE[name]}"
    return failed(name, f"nothing can be written to {place}: {error.strerror}", mend)


_CHOOSE = {"output": "job.output", "cache": "the variable FORGE_CACHE"}


@contextmanager
def _trial_folder(place: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".forge-doctor-", dir=place) as trial:
        yield Path(trial)


def existing(folder: Path) -> Path:
    """Returns the folder, or the nearest one above it that exists."""
    folder = folder.expanduser().absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def file_system_of(place: Path) -> str:
    """Returns the type of the file system that holds a folder, as the kernel names it, or words for an unknown one."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return "a file system of unknown type"
    mounts = [(fields[1], fields[2]) for fields in (line.split() for line in lines)]
    inside = [(mount, kind) for mount, kind in mounts if place.is_relative_to(mount)]
    # Of nested mounts the innermost, which has the longest path
    return max(inside, key=lambda pair: len(pair[0]), default=("", "a file system of unknown type"))[1]


def _space(name: str, place: Path) -> Result:
    stat = os.statvfs(place)
    # Available to this user: file systems may reserve a part for root
    free = stat.f_bavail * stat.f_frsize
    seen = f"{free / 1e9:,.1f} GB free"
    # 0 files in all: the file system has no fixed number of them
    if stat.f_files and stat.f_favail < 10_000:
        return warning(name, f"{seen}, but only {stat.f_favail:,} more files", "delete files that are not needed")
    if free < 5e9:
        mend = "free space: `forge-run checkpoints RUN prune`, or fewer checkpoint.keep; `forge-run plan` has the sizes"
        return failed(name, seen, mend) if free < 1e8 else warning(name, seen, mend)
    return ok(name, seen)


def check_fsync(name: str, trial: Path) -> Result:
    """Whether what was written and synced is read back, how fast that is, and how long a small sync takes."""
    # Random bytes, as a file system may compress others
    path, block = trial / "data", os.urandom(2**20)
    started = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(SIZE // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    speed = SIZE / 1e6 / (time.perf_counter() - started)
    with path.open("rb") as file:
        same = all(file.read(len(block)) == block for _ in range(SIZE // len(block)))
    path.unlink()
    if not same:
        return failed(name, "data read back differs from data written", "do not train here: the file system loses data")
    # The median, since a single sync may wait for what other programs write
    sync = statistics.median(_small_sync(trial / "small") for _ in range(5))
    seen = f"written and synced at {speed:,.0f} MB/s, a small file in {1e3 * sync:.1f} ms"
    if speed < SLOW_MBS or sync > SLOW_SYNC_S:
        return warning(name, seen, "save to a faster file system, or less often: checkpoint.interval, async_save")
    return ok(name, seen)


def _small_sync(path: Path) -> float:
    started = time.perf_counter()
    with path.open("wb") as file:
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started


def check_rename(name: str, trial: Path) -> Result:
    """Whether a folder and a file move into place at once: checkpoints are committed so."""
    unfinished, finished = trial / "0.tmp", trial / "0"
    unfinished.mkdir()
    (unfinished / "manifest").write_text("new")
    unfinished.rename(finished)
    (trial / "new").write_text("second")
    (trial / "old").write_text("first")
    os.replace(trial / "new", trial / "old")
    descriptor = os.open(trial, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # of the folder itself, as a commit does
    finally:
        os.close(descriptor)
    moved = (finished / "manifest").read_text() == "new" and not unfinished.exists()
    replaced = (trial / "old").read_text() == "second" and not (trial / "new").exists()
    if not (moved and replaced):
        return failed(name, "a renamed folder or file is not where it was moved to", OTHER_FOLDER)
    return ok(name, "folders and files move into place, and the folder syncs")


def check_lock(name: str, trial: Path) -> Result:
    """Whether a lock of this process keeps another process out: run folders and the cache rely on it."""
    path = trial / "lock"
    path.touch()
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        during = _other_process(path)
    after = _other_process(path)
    if (during, after) == ("refused", "taken"):
        return ok(name, "a second process is kept out, and let in afterwards")
    if during == "taken":
        mend = "mount with locks (NFS: without nolock; Lustre: -o flock), or two runs may write into one folder"
        return failed(name, "two processes hold one lock at the same time", mend)
    return failed(name, f"a second process answers {during!r}, and {after!r} after the release", OTHER_FOLDER)


def _other_process(path: Path) -> str:
    # Isolated and without site-packages, so that it starts quickly
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", TRY_LOCK, str(path)], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]


def check_mmap(name: str, trial: Path) -> Result:
    """Whether token files can be mapped into memory."""
    path = trial / "mapped"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
        mapped[:5] = b"forge"
        mapped.flush()
    if path.read_bytes()[:5] != b"forge":
        return failed(name, "data written through a memory map does not reach the file", OTHER_FOLDER)
    return ok(name, "files map into memory, and writes arrive")


def check_clock(name: str, trial: Path) -> Result:
    """Whether the times of files, which a server may set, agree with this machine's clock."""
    path = trial / "time"
    before = time.time()
    path.write_text("now")
    # The file was written between two readings of the clock, whose mean halves the error
    skew = path.stat().st_mtime - (before + time.time()) / 2
    # 1.7e9 is in November 2023: a clock before that was never set
    if before < 1.7e9:
        return failed(name, f"this machine's clock is set to {time.ctime(before)}", "set the clock: chronyc makestep")
    seen = f"file times are {abs(skew):.3f} s from this machine's clock"
    if abs(skew) > SKEW_S:
        mend = "synchronise the clocks of this machine and of the file server (chrony, NTP)"
        return warning(name, seen, mend)
    return ok(name, seen)


CHECKS: dict[str, Callable[[str, Path], Result]] = {
    "fsync": check_fsync,
    "rename": check_rename,
    "flock": check_lock,
    "mmap": check_mmap,
    "clock": check_clock,
}
