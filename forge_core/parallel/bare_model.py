"""The whole model of a job, on the meta device, and whether the job's stages can be applied to it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast

import torch

from forge_core.auxiliary import Auxiliary
from forge_core.contracts.contexts import BuildContext
from forge_core.contracts.data import Tokenizer
from forge_core.contracts.deprecation import deprecated
from forge_core.contracts.errors import ForgeError, JobError, Problem
from forge_core.contracts.layout import Layout
from forge_core.contracts.model import Model, misspelt, with_defaults
from forge_core.contracts.optimizer import role_problems, roles_of
from forge_core.parallel.stages import model_problems
from forge_core.plugins.catalog import Catalog
from forge_core.plugins.manager import Plugins, RunContext

if TYPE_CHECKING:
    from forge_core.job import Job

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def bare_model(job: Job, context: BuildContext) -> Model:
    """The whole model, on the meta device and changed by no stage, with parameters in the dtype that they are kept in.

    Raises:
        JobError: a method of the model is a misspelt one of `Model`.
    """
    with torch.device("meta"):
        built = context.build(job.model)
    cls = f"{type(built).__module__}.{type(built).__qualname__}"
    if not isinstance(built, Model):
        hint = "derive it from forge_core.contracts.model.Model"
        warnings.warn(deprecated(f"deriving {cls} from torch.nn.Module alone", "0.3", hint), stacklevel=2)
    elif names := next(misspelt(built), None):
        # It would never be called, and the default would be used in silence.
        hint = f"did you mean {names[1]!r}? A name of its own that is so similar starts with an underscore"
        message = f"{cls} has {names[0]!r}, which forge_core.contracts.model.Model has not; {hint}"
        raise JobError([Problem("model", message)])
    model = with_defaults(built)
    if context.dtype == torch.float64:
        model.double()
    elif job.optimizer.parameter_dtype == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    return model


def fitting_problems(job: Job, layout: Layout, catalog: Catalog) -> list[Problem]:
    """Problems of stages and the optimizer with the model, or of the model itself; no data are read.

    None where only the data show what the model needs to know of the tokenizer: the run then raises them.
    """
    tokenizer = _tokenizer(job)
    refused: list[list[Problem]] = []
    # With "auto", the run chooses the device: a model is refused here only for what is wrong on both.
    for device in ("cuda", "cpu") if job.train.device == "auto" else (job.train.device,):
        try:
            model = bare_model(job, bare_context(job, layout, catalog, torch.device(device), tokenizer))
            roles = roles_of(model)
        except _NotKnownYet:
            return []
        except JobError as error:
            refused.append(list(error.problems))
        except ForgeError as error:
            refused.append([Problem("model", str(error))])
        except Exception as error:
            message = f"building it failed: {type(error).__name__}: {error}"
            refused.append([Problem("model", f"{message}; a model is built on the meta device, without other ranks")])
        else:
            problems = [*role_problems(job.optimizer, roles), *job.optimizer.model_problems(model, layout)]
            of_stages = model_problems(model, job.parallel, layout)
            return [*of_stages, *(problem.below("optimizer") for problem in problems)]
    if job.data.tokenizer is not None and tokenizer is None:
        return []
    return [problem for problem in refused[0] if all(problem in others for others in refused)]


class _NotKnownYet(Exception):
    """The model asked something of a tokenizer that is not there yet."""


class _TokenizerToBe:
    """Stands in for the tokenizer that a run will have: its size is known before it is trained or loaded."""

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
