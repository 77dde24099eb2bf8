"""A disk that is full when a run starts is told in words."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from forge_testing.refusals import lacks

pytestmark = pytest.mark.slow


@pytest.fixture
def full_disk(tmp_path):
    """A folder on a file system of its own that has no room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize(("ranks", "free"), [((), 0), (("--nproc", "2"), 0), (("--nproc", "2"), 2)])
def test_a_full_disk_at_the_start_is_told_in_words(job, full_disk, ranks, free):
    (full_disk / "fill").write_bytes(bytes(4096 * (16 - free)))
    code, _, err = job.finish(job.start(*ranks, f"--job.output={full_disk}/runs"))
    assert "Traceback" not in err
    if free:  # room for the lock and a log, and not for metrics or a checkpoint
        assert code in (1, 2)
        assert not lacks(err, "job.output")
    else:
        assert code == 1
        speaker = "forge-run: rank 0:" if ranks else "forge-run:"
        [line] = err.splitlines()
        assert line.startswith(f"{speaker} {os.strerror(errno.ENOSPC)}, ")
        assert not lacks(line, "df -i", "job.output")
