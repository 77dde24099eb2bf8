"""The training hook that opens the features of a run, once its weights are there."""

from __future__ import annotations

from attrs import define

from forge_core import TrainingHook
from forge_core.contracts.contexts import TrainContext
from forge_plugin_vision.features.features import Features
from forge_plugin_vision.features.modules.feature_cache import CachedVision


@define(kw_only=True, slots=False)
class OpenFeatures(TrainingHook):
    """Opens the folder of the tower's features before the first step."""

    features: Features

    def on_train_begin(self, context: TrainContext) -> None:
        """Open the folder of this tower, now that its weights are final. Collective."""
        vision = getattr(context.model, "vision", None)  # the first rank of a pipeline alone has it
        if isinstance(vision, CachedVision):
            vision.open(self.features.folder, int(self.features.keep_free_gb * 1e9))
