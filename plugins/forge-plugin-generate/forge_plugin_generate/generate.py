"""Sampling from a trained model, with the model's cache (of keys and values, or of another kind)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

import torch
from attrs import field, frozen
from attrs.validators import ge, gt, le
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import Generates, Model
from forge_kit.generation import joint_generation

NO_POSITION = -1
"""Position of left padding."""


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
) -> list[list[int]]:
    """Continue every prompt by up to `max_tokens` tokens; a row stops before its own end-of-text, or end of an answer.

    Of a model that stages have split, every rank calls this, with an equal `max_tokens`. Ranks of `tp`, `pp` and `cp`
    pass the same prompts and seed, and return the same rows; those of `fsdp` have prompts of their own, at least one,
    and go on until the rows of all of them have ended.

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

    Raises:
        ForgeError: there is no prompt, or an empty one; the model has no cache (it is no
            `forge_core.contracts.model.Generates`); or several ranks share the rows, and there is no seed.
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
    device = next(model.parameters()).device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    ids, positions = _left_padded(prompts, end_of_text, device)
    room, limits = ids.shape[1] + max_tokens, joint.cache_limits()
    cache = model.new_cache(len(prompts), room)
    stops = torch.tensor([end_of_text, *stop], device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    rows: list[Tensor] = []
    step_ids, step_positions, step_entries = ids, positions, dict(entries or {})
    for _ in range(max_tokens):
        logits = joint.next_logits({"input_ids": step_ids, "positions": step_positions, **step_entries}, cache)
        token = sampling.draw(logits, generator)
        token = torch.where(done, end_of_text, token)
        done |= torch.isin(token, stops)
        rows.append(token)
        if until is not None:
            done |= _ended(until, rows, done)
        if joint.all_done(bool(done.all())):
            break
        following = positions[:, -1:] + 1
        ids, positions = torch.cat([ids, token[:, None]], 1), torch.cat([positions, following], 1)
        is_void = any(bool((following == limit).any()) for limit in limits)  # a row exceeds it by this token
        if use_cache and not is_void:  # it has what the entries brought
            step_ids, step_positions, step_entries = token[:, None], following, {}
        else:
            step_ids, step_positions, step_entries = ids, positions, dict(entries or {})
            cache = model.new_cache(len(prompts), room if use_cache else ids.shape[1])
    if not rows:
        return [[] for _ in prompts]
    return [list(takewhile(lambda id_: id_ not in (end_of_text, *stop), row)) for row in torch.stack(rows, 1).tolist()]


def _ended(until: Callable[[Sequence[int]], bool], rows: Sequence[Tensor], done: Tensor) -> Tensor:
    """Returns which rows (B,) have ended, asking of those that had not."""
    written = torch.stack(list(rows), 1).tolist()
    ended = [over or until(row) for row, over in zip(written, done.tolist(), strict=True)]
    return torch.tensor(ended, device=done.device)


def _left_padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns ids and positions (B, longest prompt), prompts flush right; padding has a negative position."""
    length = max(len(prompt) for prompt in prompts)
    ids = [[pad] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    positions = [[NO_POSITION] * (length - len(prompt)) + list(range(len(prompt))) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(positions, device=device)
