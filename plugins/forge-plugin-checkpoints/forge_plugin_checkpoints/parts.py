"""`[checkpoint.load]`: a new run starts from some of the weights of another one."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import min_len

from forge_core.checkpoint.run_folder import JOB, run_folder
from forge_core.checkpoint.storage import MANIFEST
from forge_core.contracts.components import FilePath, LoadComponent
from forge_core.contracts.errors import Problem, did_you_mean
from forge_core.plugins.catalog import CORE

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model, Outline
    from forge_core.job import Job


@frozen(kw_only=True)
class Parts(LoadComponent):
    """`[checkpoint.load]`: weights to start a new run from; a run that has its own checkpoint ignores it.

    Only weights are loaded: the optimizer, the step and the position in the data start afresh. Patterns are shell
    patterns that match the names of parameters and buffers (`layers.*`); `*` matches any characters, including dots.
    Several tables, `[[checkpoint.load]]`, load parts of the model from several checkpoints, each part from one of them.
    """

    path: FilePath = field(validator=min_len(1))
    """A checkpoint, or a run folder whose newest intact one is meant."""
    include: tuple[str, ...] = field(default=("*",), validator=min_len(1))
    """Patterns of the names to load."""
    exclude: tuple[str, ...] = ()
    """Patterns of the names not to load; they win over `include`."""
    strict: bool = True
    """Whether the checkpoint must have all that is to be loaded, and one tensor for each tied parameter; false: what it
    lacks keeps its initial values, and of two tensors that are tied in this model the first is taken."""
    accept_changes: tuple[str, ...] = ()
    """Patterns of keys of `[model]` that may differ from the run that trained the weights, though no shape
    shows it: `model.attention.rope.*`. Without one, another `theta`, number of heads or `eps` is refused."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that `path` may hold a checkpoint; whether one is intact shows in `find`."""
        path = Path(self.path)
        # Only before the run begins: later it needs these weights no more, and they may be gone.
        if (run_folder(job) / JOB).exists() or may_hold_checkpoints(path):
            return
        if not path.is_dir():
            hint = did_you_mean(path.name, [sibling.name for sibling in path.parent.glob("*/")])
            yield Problem("path", f"there is no folder {self.path!r}{hint}")
        else:
            what = f"neither a checkpoint (it has no {MANIFEST}) nor a run folder with checkpoints"
            yield Problem("path", f"{self.path!r} is {what}")

    def find(self, job: Job) -> tuple[Path, Mapping[str, Any]]:
        """Returns folder and manifest of the checkpoint, verified as `checkpoint.verify` has it."""
        from forge_core.checkpoint.resume import locate  # late, like all that imports torch

        return locate(Path(self.path), job.checkpoint.verify)

    def load(
        self, found: Any, table: str, context: BuildContext, model: Model, outline: Outline
    ) -> tuple[Collection[str], Iterable[str]]:
        """Load what `find` has returned; see `forge_plugin_checkpoints.loading.load`, which imports torch."""
        from forge_plugin_checkpoints.loading import load

        folder, manifest = found
        return load(self, table, folder, manifest, context, model, outline)

    def names(self) -> Collection[str]:
        """Returns the names that the patterns select in the checkpoint, by its index alone."""
        from forge_core.checkpoint.resume import locate
        from forge_core.checkpoint.tensors import read_index
        from forge_kit.tools.checkpoints import evaluated_names

        folder, _ = locate(Path(self.path), "sizes")
        return [name for name in evaluated_names(read_index(folder).shapes) if self.selects([name])]

    def selects(self, names: Collection[str]) -> bool:
        """Whether a tensor that goes by these names is to be loaded."""
        return fits(names, self.include) and not fits(names, self.exclude)


LoadSection = Parts
"""The name that it had in the core."""


def fits(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Whether a pattern fits one of the names."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def may_hold_checkpoints(path: Path) -> bool:
    """Whether checkpoints may be found by this path, as far as files say without a storage of the run."""
    if (path / MANIFEST).is_file() or any(path.glob(f"*/step-*/{MANIFEST}")):
        return True
    # A storage other than the core's may keep them anywhere, which shows when the run starts.
    local = f"{CORE}/local"
    jobs = (folder / JOB for folder in (path, *[*path.parents][:2]))  # of a run, or of one of its checkpoints
    job = next((tomllib.loads(job.read_text()) for job in jobs if job.is_file()), {})
    return bool(job.get("checkpoint", {}).get("storage", {}).get("type", local) != local)
