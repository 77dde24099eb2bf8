"""The folder of a drill: what the drill has made in it is removed, and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from attrs import field, frozen

from forge_core.checkpoint.run_folder import JOB
from forge_core.contracts.errors import ForgeError, listed
from forge_kit.tools.outputs import FOLDER_MARK, free_folder, mark_output
from forge_plugin_resilience.drill.records import INJECTED, STEPS

MARKER = "drill.json"
"""File by which the folder of a drill is known. It lists all files of a drill that was kept."""
RUNS = "runs"
"""Folder of the runs, `job.output` of their jobs: all in it is theirs while the drill lasts."""
LAYER = "layer.toml"
LOG = "output-{number}.txt"
MADE = (
    JOB,
    MARKER,
    FOLDER_MARK,
    *(f"*/{name}" for name in (LAYER, STEPS, INJECTED, LOG.format(number="*"))),
    f"{RUNS}/*",
)
"""What a drill makes, as patterns; `*` stands for any characters."""


@frozen
class DrillFolder:
    """The folder of one drill."""

    path: Path = field(converter=Path)

    def open(self) -> None:
        """Make the folder; the files of an earlier drill in it are removed.

        Raises:
            ForgeError: the folder is in use, is something else, or has files that no drill made.
        """
        free_folder(self.path, "--out", [MARKER])
        marker = self.path / MARKER
        if marker.exists():
            earlier = json.loads(marker.read_text())
            process = earlier["process"]
            # A drill that was killed leaves its marker, so only a living process counts
            if process != os.getpid() and Path(f"/proc/{process}").exists():
                raise ForgeError(f"{self.path} is in use by the drill of process {process}; give another by --out")
            files = self._files()
            # A drill that was killed has listed no files: they are recognised by their names
            made = set(earlier.get("files") or self._made(files))
            if others := [name for name in files if name not in made]:
                message = f"{self.path} has files that no drill made: {listed(others, 5)}"
                raise ForgeError(f"{message}; move them, or name another folder by --out")
            self._remove(made)
        self.path.mkdir(parents=True, exist_ok=True)
        mark_output(self.path)
        self._write_marker([])

    def close(self, keep: bool) -> list[str]:
        """Remove what the drill has made, unless it is to be kept. Returns the files that others made, which stay."""
        files = self._files()
        made = self._made(files)
        if keep:
            self._write_marker(made)
            return []
        self._remove(made)
        return [name for name in files if name not in set(made)]

    def _write_marker(self, files: Iterable[str]) -> None:
        (self.path / MARKER).write_text(json.dumps({"process": os.getpid(), "files": list(files)}))

    def _files(self) -> list[str]:
        """All files and links below the folder, by their paths in it."""
        walk = [(Path(folder), folders, names) for folder, folders, names in os.walk(self.path)]
        files = [folder / name for folder, _, names in walk for name in names]
        files += [folder / name for folder, folders, _ in walk for name in folders if (folder / name).is_symlink()]
        return sorted(str(file.relative_to(self.path)) for file in files)

    def _made(self, files: Iterable[str]) -> list[str]:
        return [name for name in files if any(fnmatchcase(name, pattern) for pattern in MADE)]

    def _remove(self, files: Iterable[str]) -> None:
        for name in files:
            (self.path / name).unlink(missing_ok=True)
        # From the innermost: a folder that still has a file stays, and so do all above it
        for folder, _, _ in os.walk(self.path, topdown=False):
            if not os.listdir(folder):
                os.rmdir(folder)
