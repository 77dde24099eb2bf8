"""Sampling from a trained model, with the model's cache (of keys and values, or of another kind)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import WeakSet

import torch
from attrs import field, frozen
from attrs.validators import ge, gt, le
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import Model
from forge_kit.nn.generation import Generates, JointGeneration, WholeModel, joint_generation
from forge_kit.nn.position_probe import ProbeFailed, uncached_mixer
from forge_kit.torch_internals import eagerly
from forge_plugin_generate.running_rows import RowEnd, RunningRows


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
        # In float32: bfloat16 is too coarse for sums over the vocabulary
        return torch.multinomial(self.truncated(logits.float()).softmax(-1), 1, generator=generator)[:, 0]

    def truncated(self, logits: Tensor) -> Tensor:
        """(B, V) logits, float32 or wider -> those that are drawn from; `temperature` is not 0."""
        logits = logits / self.temperature
        if self.top_k:
            kth = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            # Tokens as likely as the k-th all stay, so that the choice among them is random
            logits = logits.masked_fill(logits < kth, -torch.inf)
        if self.top_p < 1:
            logits = _nucleus(logits, self.top_p)
        return logits


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Mask tokens outside the smallest set of most likely ones with probability `top_p` (Holtzman et al. 2020)."""
    ordered, order = logits.sort(descending=True)
    # Probability of more likely tokens: 0 for the first one, which always stays
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

    If stages have split the model, every rank calls this function. Ranks of `tp`, `pp` and `cp` pass the same prompts
    and seed, and return the same rows. Each rank of `fsdp` passes its own prompts, at least one, and continues until
    the rows of all of these ranks have ended.

    Args:
        model: a model with a cache, in evaluation mode.
        prompts: token ids, none empty; they may differ in length. Negative ones stand for what `entries` has, such as
            images, in models that know them.
        max_tokens: upper bound of the tokens for each prompt.
        end_of_text: id that ends a document.
        sampling: settings of the draws; by default `Sampling()`.
        stop: further ids at which a row stops, such as the end of a turn in chats.
        until: is called with the new tokens of a row after each, and returns whether it ends with them.
        seed: seed of the draws; None: torch's default generator, where no ranks must draw alike.
        use_cache: False runs the whole model for every token. The tokens are the same, up to the rounding of logits,
            but for encodings of positions whose cached keys stay as they were (`dynamic`).
        entries: further entries (B, …) of the prompts' batch, by name (`patches`).
        batch_size: rows that are computed together, of greedy tokens; further prompts wait, in their order, until
            others have ended. 0: all.

    Raises:
        ForgeError: a prompt is missing or empty, the model has no cache, or one that forgets what a layer needs, or
            there is no seed for rows that ranks share; or prompts wait that are drawn or have `entries`.
    """
    sampling = sampling or Sampling()
    joint = _check(model, prompts, sampling, seed, batch_size, entries)
    # The probe calls the model in this process alone, so that it needs all of it
    if use_cache and isinstance(joint, WholeModel):
        check_cache(model)
    draws = Draws(sampling, seed, len(prompts), next(model.parameters()).device)
    end, size = RowEnd([end_of_text, *stop], max_tokens, until), batch_size or len(prompts)
    return RunningRows(joint, prompts, end, draws, batch_size=size, use_cache=use_cache, entries=entries or {}).run()


def check_cache(model: Model) -> None:
    """Refuse a model whose cache forgets what a layer needs, on a short sequence, once for each model.

    Raises:
        ForgeError: text would be another one than without a cache.
    """
    if model in _checked:
        return
    try:
        with eagerly():
            name = uncached_mixer(model)
    except ProbeFailed:  # it runs on GPUs only, or needs further entries
        name = None
    if name is not None:
        message = f"positions change each other in {name} of {type(model).__name__}, and its cache keeps too little of"
        hint = "pass use_cache=False (--no-cache), or let new_cache and decode keep what it needs"
        raise ForgeError(f"{message} earlier ones: text would be another than without it; {hint}")
    _checked.add(model)


# Weak references, so that a model in the set can be freed
_checked: WeakSet[Model] = WeakSet()


def _check(
    model: Model,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seed: int | None,
    batch_size: int,
    entries: Mapping[str, Tensor] | None,
) -> JointGeneration:
    """Returns how the ranks of the model generate together; raises as `generate`."""
    if not prompts:
        raise ForgeError("there is no prompt; pass at least one on every rank")
    if not all(prompts):
        raise ForgeError("a prompt is empty; pass at least one token")
    if not isinstance(model, Generates):
        raise ForgeError(f"{type(model).__name__} cannot generate: it has no new_cache and decode")
    joint = joint_generation(model)
    # The default generators of ranks may have different states
    if joint.same_rows and seed is None and sampling.temperature:
        raise ForgeError("ranks that share a model draw the same tokens only with a seed; pass one")
    if 0 < batch_size < len(prompts) and (sampling.temperature or entries):
        raise ForgeError("rows wait for others only without draws and further entries; pass each batch by itself")
    return joint


class Draws:
    """Draws the next token of each of `count` rows. What one draws does not depend on which others are left."""

    def __init__(self, sampling: Sampling, seed: int | None, count: int, device: torch.device) -> None:
        """Without a `seed`, torch's default generator draws."""
        self._sampling, self._count = sampling, count
        self._generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """(B, V) logits of the rows of these numbers -> (B,) tokens."""
        if self._sampling.temperature == 0 or len(rows) == self._count:
            return self._sampling.draw(logits, self._generator)
        index = torch.tensor(rows, device=logits.device)
        # A draw for each of the `count` rows, also for those that have ended: the generator advances by the same amount
        every = logits.new_zeros(self._count, logits.shape[-1])
        every[index] = logits
        return self._sampling.draw(every, self._generator)[index]
