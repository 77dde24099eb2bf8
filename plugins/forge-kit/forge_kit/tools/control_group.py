"""The control group (cgroup) of this process: the memory that it may have, and whether the kernel has killed for it."""

from __future__ import annotations

import re
from pathlib import Path

from attrs import frozen

UNLIMITED = 1 << 60
"""Version 1 writes a number near 2^63 where there is no limit."""


@frozen
class MemoryGroup:
    """The memory controller's group of this process, of version 1 or 2; files below `root`."""

    root: Path = Path("/")

    def kills(self) -> int:
        """How often the kernel has killed a process of the group for lack of memory; 0 where that is unknown."""
        for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
            if count := re.search(r"^oom_kill (\d+)$", self._read(name), re.MULTILINE):
                return int(count[1])
        return 0

    def limit(self) -> int:
        """Bytes that the group may have; 0: there is no limit, or it is not known."""
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = self._read(name).strip()
            if text.isdecimal() and int(text) < UNLIMITED:
                return int(text)
        return 0

    def _read(self, name: str) -> str:
        mounted = self.root / "sys/fs/cgroup"
        try:
            lines = (self.root / "proc/self/cgroup").read_text().splitlines()
            for _, controllers, path in (line.split(":", 2) for line in lines):
                if controllers in ("", "memory"):
                    # Version 2 names no controllers, and its groups are below the mount itself
                    file = (mounted / controllers / path.lstrip("/") / name).resolve()
                    if file.is_file():
                        return file.read_text()
        except (OSError, ValueError):
            # No Linux, a container that hides the group's files, or lines of another form: callers then have no limit
            # to compare with and no count of kills, and treat both as not known.
            return ""
        return ""
