"""Every distribution of this repository keeps to the contracts of plugins: one scan in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from workspace import distributions

from forge_testing.distribution import Samples, distribution_problems

NAMES = [distribution.name for distribution in distributions() if any(distribution.offers)]
VISION = {"vision": {"encoder": {"type": "vit"}}}
SAMPLES: Mapping[str, Samples] = {
    "forge-plugin-freeze": {"freeze": {"stages": [{"train": ["*"]}]}},
    "forge-plugin-grpo": {
        "prompts": {"path": "a.jsonl"},
        "grpo": {"rewards": {"sum": {"type": "answer"}}},
    },
    "forge-plugin-ladder": {"branch_points": {"steps": [1]}},
    "forge-plugin-moma": {"moma": {"experts": {"text": 4, "image": 4}}},
    "forge-plugin-mup": {"mup": {"base": {"dim": 4}}},
    "forge-plugin-preference": {"pairs": {"path": "a.jsonl"}},
    "forge-plugin-schedules": {
        "sequential": {"parts": [{"schedule": {"type": "linear"}, "until": 5}]},
        "piecewise": {"batch_sizes": [2, 4], "start_tokens": [100]},
        "ramp": {"start": 2, "increment": 2, "ramp_tokens": 100},
        "length_schedule": {"lengths": [4, 8], "start_tokens": [100]},
    },
    "forge-plugin-evaluate": {"file": {"path": "a.jsonl"}, "tasks": {"tasks": [{"type": "copy"}]}},
    "forge-plugin-transformer": {
        "longrope": {
            "short_factor": [1.0],
            "long_factor": [2.0],
            "original_max_position_embeddings": 8,
            "factor": 2.0,
        },
        "pattern": {"layers": ["one"], "kinds": {"one": {"type": "none"}}},  # of both kinds
        "parallel": {"mixers": {"near": {"type": "gqa", "window": 8}, "full": {"type": "gqa"}}},
    },
    "forge-plugin-vision": {"vision_language": VISION, "vision_tower": VISION},
    "forge-plugin-vlm-eval": {"multiple_choice": {"options": ["yes", "no"]}},
}
"""Keys of components that cannot be created from their defaults."""


@pytest.fixture(scope="module")
def problems() -> Mapping[str, Sequence[str]]:
    return distribution_problems({name: SAMPLES.get(name, {}) for name in NAMES})


@pytest.mark.parametrize("name", NAMES)
def test_a_distribution_keeps_to_the_contracts(name: str, problems: Mapping[str, Sequence[str]]) -> None:
    assert list(problems[name]) == []
