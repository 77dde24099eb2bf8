"""Models trained by other runs, for use beside the one in training, such as a teacher."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen

from forge_core.auxiliary import Auxiliary
from forge_core.checkpoint.resume import locate
from forge_core.config.load import MODEL_TABLES, parse_job
from forge_core.contracts.contexts import BuildContext
from forge_core.contracts.errors import CheckpointError
from forge_core.contracts.layout import Layout
from forge_core.contracts.model import Model, Role
from forge_core.engine.build import build_bare_model
from forge_core.job import JobSection
from forge_core.parallel.initialise import allocate, materialise
from forge_core.plugins.manager import Plugins, RunContext
from forge_kit.tools.checkpoints import load_model
from forge_kit.torch_internals import detect_fake_mode, unset_fake_temporarily

COMPUTED_IN: frozenset[Role] = frozenset(("embedding", "head", "matrix", "stack", "fused"))
"""Roles of parameters that are cast to the compute dtype wherever they are used."""


@frozen(kw_only=True)
class TrainedModel:
    """A model with the weights of a checkpoint."""

    model: Model
    checkpoint: Path
    manifest: Mapping[str, Any]


def find_trained(source: Path) -> tuple[Path, Mapping[str, Any]]:
    """Find the checkpoint that `source` names.

    Args:
        source: a checkpoint, or a run folder or job file whose newest checkpoint is taken.

    Returns:
        Its folder and its manifest.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if source.suffix != ".toml":
        return locate(source, "sizes")
    try:
        table = tomllib.loads(source.read_text()).get("job", {})
        # These keys alone: the rest of the job may need plugins that are not installed
        section = JobSection(**{key: table[key] for key in ("name", "output") if key in table})
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{source} cannot be read as a job file: {error}") from error
    return locate(Path(section.output).expanduser() / section.name, "sizes")


def load_trained(source: Path, context: BuildContext) -> TrainedModel:
    """Load the whole model on every rank for forward passes: in evaluation mode, frozen, in the dtype of `context`.

    It is built from the checkpoint's own job, with that job's plugins and without its stages. Parameters that are cast
    to the compute dtype wherever they are used are stored in it. Collective. Under a fake mode (a planned step), the
    model has no values.

    Args:
        source: see `find_trained`.
        context: the build of the run that uses the model.

    Raises:
        CheckpointError: there is no intact checkpoint.
        JobError: its model needs components that are not installed.
    """
    checkpoint, manifest = find_trained(source)
    own = context_beside(context, manifest["job"], str(checkpoint / "manifest.json"))
    with unset_fake_temporarily():  # on the meta device, like the run's own model
        model, outline = build_bare_model(own.job, own)
    if detect_fake_mode() is not None:
        allocate(model, torch.device("cpu"))  # the device that is planned for need not exist
    else:
        materialise(model, context.device, own.job.job.seed)  # for buffers, which a checkpoint need not contain
        load_model(checkpoint, model)
    for name, parameter in model.named_parameters():
        # Cast once instead of at each use: nothing updates these, and they take half the memory in bfloat16.
        if outline.roles[name] in COMPUTED_IN:
            parameter.data = parameter.data.to(context.dtype)
        parameter.requires_grad_(False)
    model.eval()
    return TrainedModel(model=model, checkpoint=checkpoint, manifest=manifest)


def context_beside(context: BuildContext, resolved: str, source: str) -> RunContext:
    """The context in which the model of another run's job is built beside the one in training.

    It has the plugins of the other run's job, this run's device, dtype and tokenizer, no mesh, and the layout of a
    single process.

    Args:
        context: this run's.
        resolved: TOML that `dump_job` wrote, as the manifest of a checkpoint has it.
        source: where it is from, for messages.

    Raises:
        JobError: its model needs components that are not installed.
    """
    assert isinstance(context, RunContext), "components receive the engine's context"
    catalog = context.plugins.catalog
    job = parse_job(resolved, source, catalog, MODEL_TABLES)
    return attrs.evolve(
        context,
        job=job,
        plugins=Plugins(job.plugins, catalog),
        layout=Layout(),
        mesh=None,
        auxiliary=Auxiliary(context.device),  # separate: a teacher's counts are no metrics of this run
        folder=None,
        path="",
        layer=None,
    )
