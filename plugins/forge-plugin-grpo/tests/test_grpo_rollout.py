"""A rollout of one file that returns what no step can learn is named, before the first update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from grpo_runs import lines_of

from forge_core.contracts.errors import ForgeError
from forge_plugin_generate.generate import Sampling
from forge_plugin_generate.sample import sample
from forge_plugin_grpo import RolloutComponent
from forge_testing.refusals import naming


@frozen(kw_only=True)
class Careless(RolloutComponent):
    """Draws as `engine` does, with one mistake."""

    mistake: str

    def build(self, context: Any, max_tokens: int, stops: Any) -> Any:  # type: ignore[override]
        def draw(model: Any, prompts: Any, seeds: Any) -> Any:
            more = self.mistake == "too long"
            drawn = sample(model, prompts, max_tokens + more, stops, Sampling(), seeds)
            if self.mistake == "no log_p":
                del drawn[0].log_p[-1]
            return drawn[1:] if self.mistake == "too few" else drawn

        return draw


@pytest.mark.parametrize(
    ("mistake", "facts"),
    [
        ("too few", ("31 completions for 32 prompts",)),
        ("too long", ("6 tokens", "loss.max_tokens is 5")),
        ("no log_p", ("values of log_p for a completion of",)),
    ],
)
def test_a_rollout_that_breaks_its_contract_is_named(tmp_path: Path, mistake: str, facts: tuple[str, ...]) -> None:
    with pytest.raises(ForgeError, match=naming("loss.rollout: Careless", *facts)):
        lines_of(tmp_path, {"steps": 1}, rollout=Careless(mistake=mistake))
