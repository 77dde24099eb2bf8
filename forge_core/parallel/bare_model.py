"""The whole model of a job, on the meta device, and whether the job's stages can be applied to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from forge_core.auxiliary import Auxiliary
from forge_core.contracts.contexts import BuildContext
from forge_core.contracts.data import Tokenizer
from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.layout import Layout
from forge_core.contracts.model import Model
from forge_core.parallel.stages import model_problems
from forge_core.plugins.catalog import Catalog
from forge_core.plugins.manager import Plugins, RunContext

if TYPE_CHECKING:
    from forge_core.job import Job

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def bare_model(job: Job, context: BuildContext) -> Model:
    """The whole model, without memory, as no stage has changed it; parameters have the dtype that they are kept in."""
    with torch.device("meta"):
        model = context.build(job.model)
    assert isinstance(model, nn.Module)
    if context.dtype == torch.float64:
        model.double()
    elif job.optimizer.parameter_dtype == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    return model


def fitting_problems(job: Job, layout: Layout, catalog: Catalog) -> list[Problem]:
    """Problems of stages and the optimizer with the model, or of the model itself; it is built on the meta device, and
    no data are read.

    Nothing where that cannot be known ahead, since only the data tell what the model needs to know of the tokenizer.
    The run tells then. On a device that is chosen when a run starts, what is wrong on each of them.
    """
    tokenizer = _tokenizer(job)
    refused: list[list[Problem]] = []
    for device in ("cuda", "cpu") if job.train.device == "auto" else (job.train.device,):
        try:
            model = bare_model(job, bare_context(job, layout, catalog, torch.device(device), tokenizer))
        except _NotKnownYet:
            return []
        except JobError as error:
            refused.append(list(error.problems))
        except Exception as error:
            seen = f"building it failed: {type(error).__name__}: {error}"
            refused.append([Problem("model", f"{seen}; a model is built on the meta device, without other ranks")])
        else:
            problems = [problem.below("optimizer") for problem in job.optimizer.model_problems(model, layout)]
            return [*model_problems(model, job.parallel, layout), *problems]
    if job.data.tokenizer is not None and tokenizer is None:
        return []
    return [problem for problem in refused[0] if all(problem in others for others in refused)]


class _NotKnownYet(Exception):
    """Something is asked of a tokenizer that is not there yet."""


class _TokenizerToBe:
    """Stands in for the tokenizer that a run will have, and has what is known of it."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __getattr__(self, name: str) -> Any:
        raise _NotKnownYet(name)


def _tokenizer(job: Job) -> Tokenizer | None:
    size = job.data.tokenizer.expected_vocab_size() if job.data.tokenizer else None
    return cast("Tokenizer", _TokenizerToBe(size)) if size else None


def bare_context(
    job: Job, layout: Layout, catalog: Catalog, device: torch.device, tokenizer: Tokenizer | None = None
) -> BuildContext:
    """A context without a mesh: no process group is needed to look at a job."""
    return RunContext(
        job=job,
        plugins=Plugins(job.plugins, catalog),
        layout=layout,
        mesh=None,
        device=device,
        dtype=DTYPES[job.train.precision],
        auxiliary=Auxiliary(torch.device("cpu")),
        tokenizer=tokenizer,
    )
