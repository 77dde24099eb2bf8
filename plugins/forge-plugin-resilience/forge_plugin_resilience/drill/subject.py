"""The job of a drill: the user's job with fewer steps, in a separate folder."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from attrs import field, frozen

from forge_core import dump_job, load_job
from forge_core.checkpoint.run_folder import JOB, storage_of
from forge_core.checkpoint.storage import Local
from forge_core.config.keys import walk_components
from forge_core.contracts.errors import JobError, Problem
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.outputs import free_folder
from forge_plugin_resilience.drill.folder import LAYER, MARKER, RUNS

if TYPE_CHECKING:
    from forge_plugin_resilience.drill.faults import Fault

FEWEST_STEPS = 6
"""For two saves, a step between them, and one after them."""
LOCAL_STORAGE = "forge-run/local"
"""The storage of a resolved job that names none."""
TABLE = "drill"
"""Name of the plugin's table in the jobs of a drill."""


@frozen(kw_only=True)
class Subject:
    """The job under drill."""

    job: Job
    """As the user has it."""
    catalog: Catalog
    ranks: int
    steps: int
    """Steps of a run of the drill."""
    folder: Path
    """Folder of the drill."""
    tables: Mapping[str, Any] = field(repr=False)
    """The job as plain tables, overrides included."""
    storage: str
    """Type of the storage of checkpoints, with its distribution."""
    stamp: str = ""
    """Added to the names of runs whose checkpoints are kept outside of the folder of the drill."""
    changes: Sequence[str] = ()
    """Differences from the user's job, in words."""

    @property
    def is_on_disk(self) -> bool:
        """Whether checkpoints are folders of the core's storage."""
        return self.storage == LOCAL_STORAGE

    @property
    def interval(self) -> int:
        """Steps between two saves."""
        return self.steps // 3

    def step_of(self, fault: Fault) -> int:
        """The step in which a fault is injected: the one before the second save, or the one that it follows."""
        if fault.twice_as_long:
            return self.steps + 1
        if fault.after_training:
            return self.steps
        return 2 * self.interval - (0 if fault.in_save else 1)

    def steps_of(self, fault: Fault) -> int:
        """Steps of the run of a fault."""
        return self.steps * (2 if fault.twice_as_long else 1)

    @property
    def replicas(self) -> int:
        """Copies of each weight."""
        layout = self.job.layout_for(self.ranks)
        assert layout is not None, "load_job has checked it for this many ranks"
        return layout.replicate

    def find(self, kind: str, type_: str) -> list[str]:
        """Returns the paths of the components of a kind and type that the job has."""
        paths = []
        for path, component in walk_components(self.job):
            if component.kind == kind and self.catalog.type_of(type(component)).rpartition("/")[2] == type_:
                paths.append(path)
        return paths

    def value(self, path: str) -> Any:
        """Returns what the job has at a path."""
        place: Any = self.job
        for name in path.split("."):
            place = place[name] if isinstance(place, Mapping) else getattr(place, name)
        return place

    def run_folder(self, key: str) -> Path:
        """Where the run of a fault is."""
        return self.folder / RUNS / self.name(key)

    def name(self, key: str) -> str:
        """`job.name` of the run of a fault."""
        return f"{self.job.job.name}-drill{self.stamp}-{key}"

    def write(self, key: str, table: Mapping[str, Any], keys: Mapping[str, Any]) -> list[Path]:
        """Write the job of a fault in two layers; returns their paths.

        Args:
            key: names the fault, its run and its folder.
            table: settings of the plugin `drill`.
            keys: further keys, by path.
        """
        (self.folder / key).mkdir(parents=True)
        base, layer = self.folder / JOB, self.folder / key / LAYER
        if not base.exists():
            base.write_text(tomli_w.dumps(self.tables))
        top: dict[str, Any] = {
            "job": {"name": self.name(key), "output": str(self.folder / RUNS)},
            # Saves by the clock would come at other steps in each run, and steps lost could not be compared
            "checkpoint": {"interval": self.interval, "interval_minutes": 0.0},
            "plugins": {TABLE: {"type": "forge-plugin-resilience/drill", "folder": str(layer.parent), **table}},
        }
        for path, value in keys.items():
            *parents, last = path.split(".")
            place = top
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
        layer.write_text(tomli_w.dumps(top))
        return [base, layer]

    def flip_bit(self, run: str) -> None:
        """Flip a bit in the middle of the largest file of the newest checkpoint of a run."""
        storage = storage_of(Path(run))
        newest = storage.path(storage.steps()[-1])
        # No JSON file, which may not parse any more: in tensors only a digest shows a flipped bit
        largest = max(
            (path for path in newest.iterdir() if path.suffix != ".json"), key=lambda path: path.stat().st_size
        )
        with largest.open("r+b") as file:
            file.seek(largest.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 4]))


def prepare(files: Sequence[str], overrides: Sequence[str], ranks: int, steps: int, output: Path | None) -> Subject:
    """Read and check a job, and choose the folder of its drill.

    Raises:
        JobError: the job is wrong, or too short for a drill.
    """
    catalog = Catalog.installed()
    output = output and free_folder(output, "--out", [MARKER])
    job = load_job(*files, overrides=overrides, catalog=catalog, world_size=ranks)
    if job.train.steps < FEWEST_STEPS:
        raise JobError([Problem("train.steps", f"{job.train.steps}: a drill takes at least {FEWEST_STEPS} steps")])
    steps = min(steps, job.train.steps)
    # The resolved job, so that overrides of the command line hold in every run
    tables = tomllib.loads(dump_job(job, catalog))
    storage = catalog.type_of(type(job.checkpoint.storage))
    changes = [f"{steps} steps of {job.train.steps:,}, a save every {steps // 3}"]
    if moved := _moved_storage(job, storage, catalog):
        # Replaced as a whole: a layer would leave keys of the other type in the table
        tables.setdefault("checkpoint", {})["storage"] = {"type": LOCAL_STORAGE}
        changes.append(moved)
        storage = LOCAL_STORAGE
    return Subject(
        job=job,
        catalog=catalog,
        ranks=ranks,
        steps=steps,
        folder=output or free_folder(Path(job.job.output) / f"{job.job.name}.drill", "--out", [MARKER]),
        tables=tables,
        storage=storage,
        # Elsewhere checkpoints outlive the folder of the drill, and a later drill must not resume from them
        stamp="" if storage == LOCAL_STORAGE else time.strftime("-%m%d%H%M%S"),
        changes=changes,
    )


def _moved_storage(job: Job, storage: str, catalog: Catalog) -> str:
    """Why checkpoints are kept in the run folder; empty if the job's own storage keeps runs apart by their names."""
    if storage == LOCAL_STORAGE:
        folder = getattr(job.checkpoint.storage, "folder", "")
        return f"checkpoints in the run folder, and not in {folder}" if folder != Local().folder else ""
    texts = _texts(catalog, job)
    if any("{job}" in text for text in texts):
        return ""
    return f"checkpoints in the run folder: {storage} does not keep runs apart by {{job}}"


def _texts(catalog: Catalog, job: Job) -> Iterator[str]:
    values = [tomllib.loads(dump_job(job, catalog))["checkpoint"]["storage"]]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value
