"""A head with one output, and how it takes the place of a head with a vocabulary. Shapes: (…, D) hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from forge_core.contracts.errors import ForgeError, JobError
from forge_kit.nn.modules import Linear
from forge_plugin_preference.reward_head import SCORE

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.model import Model, Role


class ScoreHead(nn.Module):
    """A `forge_core.contracts.model.Head` with one output, which is no logit but a score."""

    # In a module inside of the head, as `head.weight` is the name of a matrix of another shape in checkpoints of
    # language models
    vocab_shard = None

    def __init__(self, dim: int, std: float) -> None:
        super().__init__()
        self.score = Linear(dim, 1, std=std)

    @property
    def weight(self) -> Tensor:
        """The vector, (1, D): models count the FLOPs of their head by its weight."""
        return self.score.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns (…, 1), the score at each position."""
        return self.score(hidden)  # type: ignore[no-any-return]

    @contextmanager
    def whole(self, dtype: torch.dtype | None = None) -> Iterator[Sequence[Tensor]]:
        """See `Head.whole`. A stage that divides the head gathers it when `logits` calls the module."""
        weight = self.score.weight
        yield [weight if dtype is None else weight.to(dtype)]


def replace_head(model: Any, std: float, table: str) -> None:
    """Give a bare model a `ScoreHead`, and take what concerns its own head out of what it declares.

    Args:
        model: on the meta device, before any stage.
        std: standard deviation of the initial values.
        table: of the job, for errors.

    Raises:
        JobError: the head is no module of the model itself, or other parts need it.
    """
    head = dict(model.named_children()).get("head")
    weight = getattr(head, "weight", None)
    kind = type(model).__name__
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        message = f"{kind} has no module `head` with a matrix `weight`, (vocabulary, width), to put a score in place of"
        raise JobError.at(table, f'{message}; take a language model such as type = "transformer"')
    if getattr(model, "mtp", None) is not None:
        raise JobError.at(table, f"{kind} predicts several tokens by its head; leave out model.mtp")
    _untie(model, table)
    model.head = ScoreHead(weight.shape[1], std)
    _declare(model)


def _untie(model: Any, table: str) -> None:
    """Let the embedding be no longer shared with the head that is replaced."""
    if not any("head" in name.split(".") for name in model.tied_parameters()):
        return
    if not hasattr(model, "tied"):
        message = f"{type(model).__name__} ties its head to other parameters in a way that cannot be undone here"
        raise JobError.at(table, f"{message}; set model.tie_embeddings = false")
    # What `TransformerModel` and models derived from it go by, whenever torch has replaced their parameters
    model.tied = False


def _declare(model: Model) -> None:
    """Override what the model declares about parameters and modules."""
    roles, plan = model.parameter_roles, model.tensor_parallel_plan
    names = {name for name, _ in model.named_parameters()}

    def own_roles() -> Mapping[str, Role]:
        return {name: role for name, role in roles().items() if name in names}

    def own_plan() -> Mapping[str, Any]:
        others = {name: way for name, way in plan().items() if name != "head"}
        # The objective gives each rank its share of the gradient. No way for the head itself, whatever a later pattern
        # fits: it is not divided
        return {"head.score": "partial", "head": None, **others} if others else {}

    model.parameter_roles = own_roles  # type: ignore[method-assign]
    model.tensor_parallel_plan = own_plan  # type: ignore[method-assign]
    model.begins_here = [*model.begins_here, SCORE]
    # In `forge_kit.nn.generation.Generates`, what runs first
    model.new_cache = _no_text  # type: ignore[assignment]


def _no_text(*_: Any) -> Any:
    """Takes the place of `new_cache`: without logits, every token drawn would be the first of the vocabulary."""
    message = "the model scores answers by the head of [plugins.reward_head], and generates no text"
    raise ForgeError(
        f"{message}; leave out what generates, such as [hooks.samples], or take the model that it began as"
    )
