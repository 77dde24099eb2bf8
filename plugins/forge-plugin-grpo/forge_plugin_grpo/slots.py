"""Rows of completions: each row has the completions of one prompt, in slots of equal width.

Shapes: B rows of S positions, each with G completions in G slots of W = S / G positions; K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import ForgeError
from forge_plugin_grpo.objective import SAMPLED

if TYPE_CHECKING:
    from forge_plugin_grpo.kinds import Drawn


def in_slots(
    prompts: Sequence[Sequence[int]], drawn: Sequence[Drawn], group: int, length: int, padding: int
) -> dict[str, Tensor]:
    """Returns the entries of a batch, but for advantages.

    Args:
        prompts: token ids of B prompts.
        drawn: G completions of each, in order.
        group: G.
        length: S.
        padding: the token of positions without one.
    """
    size, width = len(prompts), length // group
    rows = torch.full((size * group, width), padding, dtype=torch.int64)
    labels = torch.full_like(rows, IGNORED_LABEL)
    # Holds what samplers give in any precision
    sampled = torch.zeros(rows.shape, dtype=torch.float64)
    for number, one in enumerate(drawn):
        prompt = prompts[number // group]
        ids = torch.tensor([*prompt, *one.ids])
        # The last token is only a label. So a slot of W positions holds W + 1 tokens.
        rows[number, : len(ids) - 1] = ids[:-1]
        # Labels are one place ahead: the prompt's last token predicts the first of the completion
        labels[number, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
        sampled[number, len(prompt) - 1 : len(ids) - 1] = torch.tensor(one.log_p, dtype=torch.float64)
    return {
        "input_ids": rows.view(size, -1),
        "labels": labels.view(size, -1),
        # A document each, so that completions in a row do not see each other
        "document_ids": torch.arange(group).repeat_interleave(width).expand(size, -1),
        "positions": torch.arange(width).repeat(group).expand(size, -1),
        "examples": torch.full((size,), group),
        SAMPLED: sampled.view(size, 1, -1),
    }


def routes_in_slots(drawn: Sequence[Drawn], group: int, length: int, rollout: str) -> dict[str, Tensor]:
    """Returns the entries of `forge_kit.nn.routes`, (B, 1, S, K) int16 by the name of the layer's entry.

    Args:
        drawn: G completions of each of B prompts, in order.
        group: G.
        length: S.
        rollout: what has drawn them, for errors.

    Raises:
        ForgeError: there are no routes of a completion.
    """
    entries: dict[str, Tensor] = {}
    for number, one in enumerate(drawn):
        routes: Mapping[str, Tensor] | None = getattr(one, "routes", None)
        if routes is None:
            message = f"{rollout} gives completions without `routes`, which loss.replay_routes replays"
            hint = "let it call `sample` with routes=True, or set loss.replay_routes = false"
            raise ForgeError(f"loss.rollout: {message}; {hint}")
        for entry, chosen in routes.items():
            if entry not in entries:
                shape = (len(drawn), length // group, chosen.shape[-1])
                entries[entry] = torch.full(shape, -1, dtype=torch.int16)
            entries[entry][number, : len(chosen)] = chosen
    return {entry: table.view(len(drawn) // group, 1, length, -1) for entry, table in entries.items()}
