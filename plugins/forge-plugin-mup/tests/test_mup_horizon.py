"""Rules for batch and length: AdamW keeps its noise and its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_plugin_adamw import AdamW
from forge_plugin_lion import Lion
from forge_plugin_mup import MuP
from forge_plugin_mup.horizon import Horizon
from forge_plugin_schedules import Piecewise
from forge_testing import TinyModel, tiny_job
from forge_testing.catalogs import installed
from forge_testing.curves import Training
from forge_testing.refusals import at, check_problems, problems_of

BASE = {"lr": 0.02, "weight_decay": 0.5, "betas": (0.9, 0.95), "eps": 1e-2}


def spread(settings: dict[str, Any], batch: int, steps: int) -> list[float]:
    """Mean and deviation of many weights that noisy gradients of x² / 2 draw to 0, at three times of a run."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.ones(4000))
    optimizer = torch.optim.AdamW([weights], **settings)
    found: list[float] = []
    for step in range(1, steps + 1):
        noise = torch.randn(len(weights), generator=draw) / batch**0.5
        weights.grad = 0.05 * weights.detach() + noise
        optimizer.step()
        if step % (steps // 4) == 0:
            found += [weights.mean().item(), weights.std().item()]
    return found


def test_adamw_has_the_same_law_at_four_times_the_batch() -> None:
    """By simulation: a quarter of the steps, each of four times the batch, and so of half the noise."""
    expected = spread(BASE, 1, 800)
    scaled = Horizon(batch=4).applied(BASE)
    assert scaled == {
        "lr": pytest.approx(0.04),
        "weight_decay": pytest.approx(1.0),
        "betas": (pytest.approx(0.6), pytest.approx(0.8)),
        "eps": pytest.approx(0.5e-2),
    }
    assert spread(scaled, 4, 200) == pytest.approx(expected, rel=0.05, abs=0.01)
    assert spread(BASE, 4, 200) != pytest.approx(expected, rel=0.05, abs=0.01)


def test_a_longer_run_takes_shorter_steps() -> None:
    """As far in time: decay takes as much away in the whole run, and averages span the same part of it."""
    longer = Horizon(tokens=4).applied(BASE)
    assert longer["lr"] * longer["weight_decay"] * 4 == pytest.approx(BASE["lr"] * BASE["weight_decay"])
    assert longer["betas"] == (pytest.approx(0.975), pytest.approx(0.9875))
    assert longer["lr"] == pytest.approx(BASE["lr"] / 2)
    assert longer["eps"] == BASE["eps"]
    # Both at once leave the number of steps, and with it all but epsilon
    both = Horizon(batch=4, tokens=4).applied(BASE)
    assert both == BASE | {"eps": BASE["eps"] / 2, "betas": (pytest.approx(0.9), pytest.approx(0.95))}


def test_a_job_follows_the_batch_and_length_of_the_base(tmp_path: Path) -> None:
    plugin = MuP(parametrization="mup", base={"dim": 8}, base_batch_tokens=16, base_tokens=16 * 32)
    # 4 x 8 tokens a step, twice the base's, and as many in all
    optimizer = AdamW(lr=0.02, eps=1e-6)
    settings = {"steps": 16, "global_batch_size": 4, "seq_len": 8}
    job = tiny_job(
        str(tmp_path), installed(), model=TinyModel(), optimizer=optimizer, plugins={"mup": plugin}, **settings
    )
    with Training.of(job) as training:
        groups = {name: group for group in training.run.optimizer.param_groups for name in group["names"]}
        shown = next(iter(plugin.choices(training.run.context)))
    assert groups["embedding.weight"]["lr"] == pytest.approx(0.02 * 2**0.5)
    assert groups["layers.0.up.weight"]["lr"] == pytest.approx(0.02 * 2**0.5 / 2)
    assert groups["layers.0.up.weight"]["betas"] == (pytest.approx(0.8), pytest.approx(0.9))
    assert shown == (
        "mup",
        "of all parameters rate x 1.414, weight decay x 1.414, 1 - betas x 2, epsilon x 0.7071",
        "batch x 2, tokens x 1",
    )


def test_steps_of_several_sizes_are_refused(tmp_path: Path) -> None:
    plugin = MuP(parametrization="mup", base={"dim": 8}, base_batch_tokens=16)
    schedule = Piecewise(batch_sizes=(2, 4), start_tokens=(64,))
    settings = {"optimizer": AdamW(), "plugins": {"mup": plugin}, "batch_schedule": schedule}
    check_problems(
        problems_of(tiny_job(str(tmp_path), installed(), **settings)), at("plugins.mup", "train.batch_schedule")
    )


@pytest.mark.parametrize(
    ("optimizer", "facts"), [(Lion(), ("Lion", "adam_rule")), (AdamW(betas=(0.5, 0.95)), (4, 0.5, -1))]
)
def test_what_cannot_follow_is_refused(tmp_path: Path, optimizer: Any, facts: tuple[Any, ...]) -> None:
    plugin = MuP(parametrization="mup", base={"dim": 8}, base_batch_tokens=8)
    job = tiny_job(str(tmp_path), installed(), model=TinyModel(), optimizer=optimizer, plugins={"mup": plugin})
    check_problems(problems_of(job), at("plugins.mup", *facts))
