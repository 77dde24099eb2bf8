"""A frozen model that losses compare with the one in training, divided over ranks as that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_core.contracts.components import ParallelComponent
from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.layout import DIMENSIONS, Layout
from forge_core.contracts.runtime import ParallelStage
from forge_core.engine.build import build_bare_model, stages_of
from forge_core.parallel.initialise import allocate, materialise
from forge_core.parallel.stages import apply_stages, around
from forge_core.plugins.manager import RunContext
from forge_kit.tools.checkpoints import load_model
from forge_kit.torch_internals import detect_fake_mode, unset_fake_temporarily
from forge_plugin_losses.log_probabilities import log_probabilities
from forge_plugin_losses.teacher import COMPUTED_IN, context_beside, find_trained
from forge_plugin_losses.workspace import Workspace

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Model, Outline


@frozen
class Reference:
    """A frozen model in evaluation mode, and the stages that divide it."""

    model: Model
    stages: Sequence[ParallelStage]
    checkpoint: Path
    chunk_tokens: int
    workspace: Workspace

    @torch.no_grad()
    def log_probabilities(self, batch: Batch) -> Tensor:
        """Compute log p of each label (B, S), 0 where there is none. Collective among the ranks that divide it."""
        # After the forward pass stages free what they have gathered: the model in training needs the memory
        with around(self.stages, self.model, backward=False, last=True):
            hidden = self.model(dict(batch))  # a copy: a model may add entries that are wrong for another
            return log_probabilities(
                self.model.head, hidden, batch["labels"], chunk_tokens=self.chunk_tokens, workspace=self.workspace
            )


def load_reference(source: Path, context: BuildContext, chunk_tokens: int) -> Reference:
    """Load the reference under the layout of the run. Collective.

    The stages of the run that divide a model (`fsdp`, `tp`) or sequences (`cp`) divide the reference likewise: no rank
    need hold all of it. A pipeline computes the loss on its last rank only: each of its ranks has all layers, of
    which `fsdp` divides the parameters among the ranks of that stage. Stages that only change how a model is computed
    (recomputation, `compile`, `float8`) are left out. Under a fake mode (a planned step), the model has no values.

    Args:
        source: see `forge_plugin_losses.teacher.find_trained`.
        context: the build of the run.
        chunk_tokens: positions whose logits exist at a time; 0: the default of `log_probabilities`.

    Raises:
        CheckpointError: there is no intact checkpoint.
        JobError: its model needs components that are not installed, does not fit the layout, or is no language model
            with the tokenizer of this job.
    """
    assert isinstance(context, RunContext), "components receive the engine's context"
    checkpoint, manifest = find_trained(source)
    _check_tokenizer(checkpoint, manifest, context)
    own = context_beside(context, manifest["job"], str(checkpoint / "manifest.json"))
    layers = {dimension.name for dimension, _ in context.layout.sizes if dimension.layers}
    kept = {name: stage for name, stage in context.job.parallel.items() if _divides(stage, layers)}
    stages = stages_of(attrs.evolve(context.job, parallel=kept), context)
    own = attrs.evolve(own, layout=_without_pipeline(context.layout), mesh=context.mesh)
    with unset_fake_temporarily():  # on the meta device, like the run's own model
        model, outline = build_bare_model(own.job, own)
        _check_vocabulary(checkpoint, outline, context)
        try:
            model, built = apply_stages(model, stages, own)
        except JobError as error:
            problems = [Problem("loss.reference", f"{checkpoint}: {problem}") for problem in error.problems]
            raise JobError(problems) from error
    home = next((stage.parameter_device for stage in built if stage.parameter_device is not None), None)
    if detect_fake_mode() is not None:
        allocate(model, torch.device("cpu"))  # the device that is planned for need not exist
    else:
        materialise(model, context.device, own.job.job.seed, home)  # for buffers, which a checkpoint need not contain
        load_model(checkpoint, model)
    for name, parameter in model.named_parameters():
        # Cast once instead of at each use: nothing updates these, and they take half the memory in bfloat16. A part of
        # a divided parameter stays as it is: its stage casts what it gathers.
        if outline.roles[name] in COMPUTED_IN and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(context.dtype)
        parameter.requires_grad_(False)
    return Reference(model.eval(), built, checkpoint, chunk_tokens, Workspace())


def _check_tokenizer(checkpoint: Path, manifest: Mapping[str, dict[str, str]], context: BuildContext) -> None:
    fingerprint = manifest["provenance"].get("tokenizer")
    # A manifest without a fingerprint, of a run without a tokenizer, has nothing to compare
    if context.tokenizer is not None and fingerprint not in (None, context.tokenizer.fingerprint()):
        message = f"{checkpoint} was trained with another tokenizer: its ids mean other texts"
        raise JobError([Problem("loss.reference", f"{message}; take a reference with the tokenizer of this job")])


def _check_vocabulary(checkpoint: Path, outline: Outline, context: BuildContext) -> None:
    """Refuse a model that gives fewer probabilities than there are tokens, as a reward model does."""
    # Tied heads have no parameter of their own, and the rows of the embedding
    outputs = [outline.tensors[name][0] for name, role in outline.roles.items() if role == "head"]
    if context.tokenizer is not None and outputs and outputs[0] < context.tokenizer.vocab_size:
        tokens = f"the tokenizer has {context.tokenizer.vocab_size} tokens"
        message = f"the size of the output of {checkpoint} is {outputs[0]}, and {tokens}"
        raise JobError([Problem("loss.reference", f"{message}; take a language model, and no reward model")])


def _divides(stage: ParallelComponent, layers: set[str]) -> bool:
    """Whether the reference needs a stage of the run."""
    # By the dimensions that a stage declares and not by its name, so that stages of others count, too. `ep` declares
    # none, as it shares those of `fsdp`, which then divides the experts like all else.
    return bool(stage.degrees()) and not layers & stage.degrees().keys()


def _without_pipeline(layout: Layout) -> Layout:
    """The layout of the ranks that compute the loss together."""
    further = [dimension for dimension, _ in layout.sizes if dimension not in DIMENSIONS]
    degrees = {dimension.name: size for dimension, size in layout.sizes if not dimension.layers}
    return Layout(further, run=layout.run, **degrees)
