"""The plugin `features`."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, field
from attrs.validators import ge

from forge_core import Job, JobError, ModelComponent, Plugin, Problem, TrainingHook, hookimpl
from forge_core.contracts.components import FilePath
from forge_plugin_vision import VisionLanguage

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.contracts.model import Model


@define(kw_only=True, slots=False)
class Features(Plugin):
    """Keeps the features of a frozen vision tower on disk, and runs the tower for images only that are not there yet.

    Features are looked up by the tower (its type, keys and weights, the compute dtype) and by the image as the tower
    receives it, so stored features equal those the tower would compute. Any number of ranks and runs may use a folder
    at once.
    """

    resumes_as = "safe"  # it changes no number

    path: FilePath | None = None
    """Folder of the features; each tower has its own subfolder. By default `features` in Forge's cache
    (`$FORGE_CACHE`, else `~/.cache/forge`)."""
    keep_free_gb: float = field(default=1.0, validator=ge(0))
    """Space in GB that is left free on the file system: with less, no features are added, and the features of new
    images are computed each time."""

    @property
    def folder(self) -> Path:
        """The folder of the features of all towers."""
        from forge_kit.data.cache import cache_root

        return cache_root() / "features" if self.path is None else Path(self.path).absolute()

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Yields that the model has no vision tower, or that `path` is a file."""
        if not isinstance(job.model, VisionLanguage):
            message = f'{type(job.model).__name__} has no vision tower; take model type = "vision_language"'
            yield Problem("", f"{message}, or leave [plugins.features] out")
        if self.folder.exists() and not self.folder.is_dir():
            yield Problem("path", f"{self.folder} is a file; name a folder, which is made if there is none")

    # Outside of the wrappers of other plugins, which may add parameters to the tower, or freeze it.
    @hookimpl(wrapper=True, tryfirst=True)
    def forge_build_model(self, component: ModelComponent, context: BuildContext) -> Generator[None, Model, Model]:
        """Let the job's model keep features, once it is built.

        Raises:
            JobError: features of the tower cannot be kept, see `problems_of`.
        """
        model = yield
        if component is context.job.model and isinstance(component, VisionLanguage):  # and not a model inside of it
            from forge_plugin_vision.features.eligibility import problems_of
            from forge_plugin_vision.features.modules.feature_cache import add_cache

            if problems := list(problems_of(model.get_submodule("vision.encoder"), context.job)):
                raise JobError(problem.below("plugins.features") for problem in problems)
            add_cache(model, component, context)
        return model

    def training_hooks(self, job: Job) -> Iterable[TrainingHook]:
        """Returns the hook that opens the folder: its name depends on weights, which are loaded after building."""
        from forge_plugin_vision.features.hook import OpenFeatures

        return [OpenFeatures(features=self)]

    def waits(self) -> str:
        """Those of the cache, whose rows are looked up on the host."""
        return "some for each micro-batch, for rows of the cached features"

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Reports the folder in the summary of the run."""
        yield "features", f"kept in {self.folder}", "the vision tower runs for images that are not there"
