"""Whether features of a tower can be kept: it must be frozen, and draw no random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from forge_core import Job, Problem
from forge_kit.torch_internals import Dropout, NormBase
from forge_plugin_freeze import Freeze
from forge_plugin_freeze.selection import trains
from forge_plugin_vision import image_input

PREFIX = "vision.encoder."
"""Prefix of the tower's parameters in the model."""
SHOWN = 3
"""Names that a message lists."""
FIX = f'freeze = ["{PREFIX}*"]'


def problems_of(encoder: nn.Module, job: Job) -> Iterator[Problem]:
    """Yields why features of `encoder` cannot be kept in `job`; paths are relative to the plugin's table."""
    yield from _unsteady(encoder)
    seen = image_input(job)
    # Features are cut out of a row by the places of patches.
    if (room := seen.encoder.feature_room(patches := seen.patches_per_sequence)) != patches:
        message = f"a row of {patches} patches has {room} features, and one is kept for each patch of an image"
        yield Problem("", f"{message}; leave [plugins.features] out, or take an encoder such as vit")
    freezing = [(name, plugin) for name, plugin in job.plugins.items() if isinstance(plugin, Freeze)]
    names = [f"{PREFIX}{name}" for name, _ in encoder.named_parameters()]
    # Judged by the patterns alone, which apply to the whole run: the parameters that require gradients now reflect one
    # stage, or none, depending on which plugin was built first.
    for table, freeze in freezing:
        for number, stage in enumerate(freeze.stages):
            if trained := [name for name in names if trains(stage, name)]:
                message = f"stage {number} of [plugins.{table}] trains {_some(trained)}, so that features change"
                yield Problem("", f"{message}; add {FIX} to plugins.{table}.stages.{number}, or leave features out")
    # Without that plugin, `requires_grad` shows whether something else has frozen the tower.
    if not freezing and (trained := training(encoder)):
        message = f"nothing freezes the vision tower: {_some(trained)} would train, so that features change"
        yield Problem("", f"{message}; add [plugins.freeze] with stages of {FIX}, or leave features out")


def training(encoder: nn.Module) -> list[str]:
    """Returns the names of the tower's parameters that require gradients."""
    return [f"{PREFIX}{name}" for name, parameter in encoder.named_parameters() if parameter.requires_grad]


def _unsteady(encoder: nn.Module) -> Iterator[Problem]:
    """Modules whose outputs differ from call to call in training."""
    for name, module in encoder.named_modules():
        if isinstance(module, Dropout) and module.p:
            message = f"{PREFIX}{name} drops out at random (p = {module.p:g}), so features differ from step to step"
            yield Problem("", f"{message}; set it to 0 in the encoder")
        if isinstance(module, NormBase) and module.track_running_stats:
            message = f"{PREFIX}{name} is a {type(module).__name__}, whose output depends on the other images"
            yield Problem("", f"{message} of a batch; take an encoder without it")


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
