"""Activation patching: which activations of one prompt bring its answer into another (Meng et al. 2022, section 2).

Shapes: P points, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import frozen
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import Model
from forge_plugin_taps.lens.activations import points_of, read_points


@frozen
class PatchingEffects:
    """What each activation of the clean prompt does in the corrupted one."""

    points: Sequence[str]
    effects: Tensor
    """(P, S): 0 where the answer stays as in the corrupted prompt, 1 where it becomes as in the clean one; other values
    too, as nothing bounds them."""
    clean: float
    """Measure of the clean prompt: the difference of the logits of both answers at the last position."""
    corrupted: float
    """Likewise of the corrupted prompt."""


@torch.no_grad()
def patching_effects(
    model: Model,
    clean: Sequence[int],
    corrupted: Sequence[int],
    answer: int,
    other: int,
    patterns: Sequence[str] = ("layers.*.resid_pre",),
    progress: Callable[[str], None] = lambda point: None,
) -> PatchingEffects:
    """Put each activation of the clean prompt, at each point and position, into a run of the corrupted one.

    The measure is logit(answer) - logit(other) at the last position; an effect is (patched - corrupted) / (clean -
    corrupted). One forward pass a point, whose rows are the positions.

    Args:
        model: whole, as `forge_core.load_model` returns it without `parallel`.
        clean: S ids.
        corrupted: S other ids.
        answer: the token that the clean prompt has next.
        other: the one that the corrupted prompt has.
        patterns: globs over points whose tensors are by position.
        progress: is called with each point before it is tried.

    Raises:
        ForgeError: the prompts have different lengths, a point has no tensor by position, or the measure is the
            same for both.
    """
    if len(clean) != len(corrupted):
        message = f"the prompts have {len(clean)} and {len(corrupted)} tokens"
        raise ForgeError(f"{message}; activations are put in position by position, so they must have the same number")
    points = list(points_of(model, patterns))
    device = next(model.parameters()).device
    rows = torch.tensor([list(clean), list(corrupted)], device=device)
    sources = read_points(model, {"input_ids": rows[:1]}, points)
    if absent := [point for point in points if point not in sources.values]:
        raise ForgeError(f"nothing passes {absent[0]} in a prompt of text; choose others with --points")
    # The pass that reads the clean activations has its measure too, so no further pass is needed
    first = _differences(model, sources.hidden, answer, other)[0]
    last = _differences(model, read_points(model, {"input_ids": rows[1:]}, ()).hidden, answer, other)[0]
    if first == last:
        raise ForgeError("both prompts have the same difference of logits, so there is no effect to explain")
    length = len(clean)
    # S copies of the corrupted prompt, so that one pass tries all positions of a point
    batch = {"input_ids": rows[1:].expand(length, -1).contiguous()}
    effects = []
    for point in points:
        progress(point)
        changed = read_points(model, batch, (), {point: _diagonal(sources.values[point])})
        patched = _differences(model, changed.hidden, answer, other)
        effects.append((patched - last) / (first - last))
    return PatchingEffects(points, torch.stack(effects).cpu(), float(first), float(last))


def _diagonal(source: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a change that puts the source's (1, S, …) position n into row n."""

    def change(x: Tensor) -> Tensor:
        if len(source) != 1 or x.shape[:2] != (source.shape[1], source.shape[1]):
            raise ForgeError(f"this point has {tuple(x.shape)}, which is not by position; choose others with --points")
        index = torch.arange(len(x), device=x.device)
        # x may be read by others, such as the residual stream around a block.
        changed = x.clone()
        changed[index, index] = source[0]
        return changed

    return change


def _differences(model: Model, hidden: Tensor, answer: int, other: int) -> Tensor:
    """(B, S, D) to (B,): the difference of logits at the last position."""
    with model.head.whole(hidden.dtype):
        # The last position only: S rows of S x V logits would need more memory than the rest of the pass
        logits = model.head.logits(hidden[:, -1:])[:, 0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits[:, answer] - logits[:, other]
