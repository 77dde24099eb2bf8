"""Sampling from a trained model, with the model's cache (of keys and values, or of another kind)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from attrs import field, frozen
from attrs.validators import ge, gt, le
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import Generates, Model
from forge_kit.generation import joint_generation
from forge_plugin_generate.running_rows import RunningRows


@frozen(kw_only=True)
class Sampling:
    """Settings of drawing the next token, applied in this order: temperature, top-k, top-p."""

    temperature: float = field(default=1.0, validator=ge(0))
    """0 takes the most likely token."""
    top_k: int = field(default=0, validator=ge(0))
    """Only the k most likely tokens; 0: all."""
    top_p: float = field(default=1.0, validator=[gt(0), le(1)])
    """Only the most likely tokens that together have this probability."""

    def draw(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """(B, V) logits -> (B,) token ids."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k:
            kth = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        if self.top_p < 1:
            logits = _nucleus(logits, self.top_p)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Mask tokens outside the smallest set of most likely ones with probability `top_p` (Holtzman et al. 2020)."""
    ordered, order = logits.sort(descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    ordered = ordered.masked_fill(before >= top_p, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


@torch.no_grad()
def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    end_of_text: int,
    sampling: Sampling | None = None,
    *,
    stop: Sequence[int] = (),
    until: Callable[[Sequence[int]], bool] | None = None,
    seed: int | None = None,
    use_cache: bool = True,
    entries: Mapping[str, Tensor] | None = None,
    batch_size: int = 0,
) -> list[list[int]]:
    """Continue every prompt by up to `max_tokens` tokens; a row stops before its own end-of-text, or end of an answer.

    Of a model that stages have split, every rank calls this. Ranks of `tp`, `pp` and `cp` pass the same prompts and
    seed, and return the same rows; those of `fsdp` have prompts of their own, at least one, and go on until the rows of
    all of them have ended.

    Rows that have ended are not computed for long: others take their place, or the batch becomes smaller.

    Args:
        model: a model with a cache, in evaluation mode.
        prompts: token ids, none empty; they may differ in length. Negative ones stand for what `entries` has, such as
            images, in models that know them.
        max_tokens: upper bound of the tokens for each prompt.
        end_of_text: id that ends a document.
        sampling: settings of the draws; by default those of `Sampling`.
        stop: further ids at which a row stops, such as the end of a turn in chats.
        until: is called with the new tokens of a row after each, and returns whether it ends with them.
        seed: seed of the draws; None: torch's default generator, where no ranks must draw alike.
        use_cache: False runs the whole model for every token. The tokens are the same, up to the rounding of logits,
            but for encodings of positions whose cached keys stay as they were (`dynamic`).
        entries: further entries (B, …) of the prompts' batch, by name (`patches`).
        batch_size: rows that are computed together, of greedy tokens; further prompts wait, in their order, until
            others have ended. 0: all.

    Raises:
        ForgeError: there is no prompt, or an empty one; the model has no cache (it is no
            `forge_core.contracts.model.Generates`); or several ranks share the rows, and there is no seed;
            or prompts wait that are drawn or have `entries`.
    """
    if not prompts:
        raise ForgeError("there is no prompt; pass at least one on every rank")
    if not all(prompts):
        raise ForgeError("a prompt is empty; pass at least one token")
    if not isinstance(model, Generates):
        raise ForgeError(f"{type(model).__name__} cannot generate: it has no new_cache and decode")
    sampling, joint = sampling or Sampling(), joint_generation(model)
    if joint.same_rows and seed is None and sampling.temperature:
        raise ForgeError("ranks that share a model draw the same tokens only with a seed; pass one")
    if 0 < batch_size < len(prompts) and (sampling.temperature or entries):
        raise ForgeError("rows wait for others only without draws and further entries; pass each batch by itself")
    device = next(model.parameters()).device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    rows = RunningRows(
        joint,
        prompts,
        max_tokens=max_tokens,
        draw=partial(_draw, sampling, generator, len(prompts)),
        stops=[end_of_text, *stop],
        until=until,
        batch_size=batch_size or len(prompts),
        use_cache=use_cache,
        entries=entries or {},
    )
    while not joint.all_done(rows.finished):
        rows.step()
    return rows.written


def _draw(
    sampling: Sampling, generator: torch.Generator | None, count: int, logits: Tensor, rows: Sequence[int]
) -> Tensor:
    """Returns the tokens (B,) of some of `count` rows. What one draws does not depend on which others are left."""
    if sampling.temperature == 0 or len(rows) == count:
        return sampling.draw(logits, generator)
    index = torch.tensor(rows, device=logits.device)
    every = logits.new_zeros(count, logits.shape[-1])
    every[index] = logits
    return sampling.draw(every, generator)[index]
