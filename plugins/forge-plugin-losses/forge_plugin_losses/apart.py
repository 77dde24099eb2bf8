"""Whether a model keeps the documents in a row apart, for losses that compare or score several answers in a row."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import attrs
import torch

from forge_core.auxiliary import Auxiliary
from forge_core.contracts.errors import JobError, Problem
from forge_core.contracts.model import with_defaults
from forge_kit.nn.position_probe import ProbeFailed, leaking_part
from forge_kit.torch_internals import detect_fake_mode

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext


def check_apart(context: BuildContext, answers: str = "answers") -> None:
    """Run the model of a job on a short sequence of two documents.

    Args:
        context: of the run.
        answers: what the documents in a row are, for errors.

    Raises:
        JobError: what stands in one document changes the other; the part of the model is named.
    """
    if detect_fake_mode() is not None:  # a planned step, of which nothing is computed
        return
    # Bare and by itself: its counts are no metrics of this run, and no plugin of the run takes part
    alone = attrs.evolve(context, auxiliary=Auxiliary(torch.device("cpu")), mesh=None, device=torch.device("cpu"))
    with torch.device("meta"):
        model = with_defaults(context.job.model.build(alone))
    cls = type(model).__name__
    try:
        name = leaking_part(model)
    except ProbeFailed as error:
        message = f"loss: not checked whether {cls} keeps the {answers} in a row apart: it does not run"
        warnings.warn(f"{message} on the CPU, with a short sequence ({error})", stacklevel=2)
        return
    if name is not None:
        message = f"{answers} in a row would change each other in {name} of {cls}"
        hint = "let it stay within equal `document_ids` of the batch (docs/data.md), or take another model"
        raise JobError([Problem("loss", f"{message}; {hint}")])
