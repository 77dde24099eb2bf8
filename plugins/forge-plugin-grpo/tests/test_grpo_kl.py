"""The KL divergence from a reference: TRL's numbers, a start at 0, adapters off, and what is refused."""

from __future__ import annotations
import __future__

import ast
import importlib.util
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import define
from grpo_runs import Even, lines_of, reference, settings
from torch import Tensor

from forge_core import TrainingHook
from forge_core.contracts.errors import ForgeError
from forge_plugin_checkpoints import Parts
from forge_plugin_grpo import GRPO
from forge_plugin_grpo.objective import k3, objective
from forge_plugin_lora import LoRA
from forge_testing import tiny_job
from forge_testing.catalogs import installed
from forge_testing.refusals import at, check_problems, naming, problems_of

ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "rloo")
TRL = importlib.util.find_spec("trl")


# --- formulas --------------------------------------------------------------------------------------------------------


def completions() -> dict[str, Tensor]:
    """log p (1, 6, 7) of six completions of several lengths, and what else an objective is a function of."""
    generator = torch.Generator().manual_seed(5)
    log_p, old, reference = 0.4 * torch.randn(3, 1, 6, 7, generator=generator, dtype=torch.float64) - 1
    valid = torch.arange(7) < torch.tensor([[[7], [1], [3], [5], [2], [7]]])
    advantages = torch.randn(1, 6, generator=generator, dtype=torch.float64)
    return {"log_p": log_p.where(valid, 0), "old": old, "reference": reference, "valid": valid, "a": advantages}


def ours(algorithm: Any, weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """The mean objective, its gradient, and the mean of k3 over tokens."""
    c = completions()
    log_p = c["log_p"].requires_grad_()
    loss = GRPO(rewards={"one": Even()}, algorithm=algorithm, group=6, max_tokens=7, clip_high=0.3)
    result = objective(loss, log_p, c["old"], c["valid"], c["a"], c["reference"])
    assert result.kl is not None
    tokens = c["valid"].sum()
    total = (result.sum + weight * result.kl.sum) / (tokens if result.unit == "token" else 6)
    return total.detach(), torch.autograd.grad(total, log_p)[0][0], result.kl.tokens / tokens


def theirs(loss_type: str, level: str, beta: float) -> tuple[Tensor, Tensor, float]:
    """The same by TRL's own code, of which one method is compiled: its imports take many seconds."""
    assert TRL is not None
    assert TRL.origin is not None
    tree = ast.parse((Path(TRL.origin).parent / "trainer" / "grpo_trainer.py").read_text(encoding="utf-8"))
    [cls] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GRPOTrainer"]
    [method] = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "_compute_loss"]
    names: dict[str, Any] = {"torch": torch, "nanmin": torch.min, "nanmax": torch.max}
    code = compile(ast.Module([method], []), "trl", "exec", flags=__future__.annotations.compiler_flag)
    exec(code, names)

    c = {name: value[0] for name, value in completions().items()}
    log_p = c["log_p"].requires_grad_()
    mask = c["valid"].double()
    arguments = SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1)
    trainer = SimpleNamespace(
        aux_loss_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_p, torch.zeros_like(log_p), None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        args=arguments,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=0.3,
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=7,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    ids = torch.zeros_like(log_p).long()
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": mask,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": c["a"],
        "old_per_token_logps": c["old"],
        "ref_per_token_logps": c["reference"],
        "num_items_in_batch": mask.sum(),
    }
    loss = names["_compute_loss"](trainer, None, inputs)
    kl = trainer._metrics["train"]["kl"]
    return loss.detach(), torch.autograd.grad(loss, log_p)[0], kl[0] if kl else 0.0


@pytest.mark.skipif(TRL is None, reason="needs TRL (pip install --no-deps trl)")
@pytest.mark.parametrize(
    ("algorithm", "loss_type", "level"),
    [
        ("grpo", "grpo", "token"),
        ("dr_grpo", "dr_grpo", "token"),
        ("dapo", "dapo", "token"),
        ("gspo", "grpo", "sequence"),
        # Of `rloo` TRL's sum over tokens has another policy term: the divergence alone is compared
        ("rloo", "luspo", "sequence"),
    ],
)
def test_objectives_are_those_of_trl(algorithm: str, loss_type: str, level: str) -> None:
    of_policy = 0.0 if algorithm != "rloo" else 1.0
    found, expected = (
        [one - of_policy * other for one, other in zip(compute(0.3), compute(0.0), strict=True)]
        for compute in (partial(ours, algorithm), partial(theirs, loss_type, level))
    )
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-12)
    assert ours(algorithm, 0.0)[2].item() == pytest.approx(theirs(loss_type, level, 0.3)[2], rel=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_objectives_are_the_written_sums(algorithm: str) -> None:
    c = {name: value[0] for name, value in completions().items()}
    sums = []
    for n in range(6):
        ratios = [(c["reference"][n, t] - c["log_p"][n, t]).exp() for t in range(7) if c["valid"][n, t]]
        sums.append(sum(ratio - ratio.log() - 1 for ratio in ratios))
    lengths = c["valid"].sum(1)
    means = {
        "grpo": sum(each / length for each, length in zip(sums, lengths, strict=True)) / 6,
        "dr_grpo": sum(sums) / 7 / 6,
        "dapo": sum(sums) / lengths.sum(),
        "rloo": sum(sums) / 6,
    }
    means["gspo"] = means["grpo"]
    with_kl, without = ours(algorithm, 0.3), ours(algorithm, 0.0)
    assert (with_kl[0] - without[0]).item() == pytest.approx(0.3 * float(means[algorithm]), rel=1e-10)
    assert with_kl[2].item() == pytest.approx(float(means["dapo"]), rel=1e-12)


def test_the_estimate_is_the_divergence_on_average() -> None:
    """Over all draws from p, in closed form: the sum of p (log p - log q)."""
    p, q = (torch.randn(9, generator=torch.Generator().manual_seed(n)).double().softmax(0) for n in (1, 2))
    assert (p * k3(p.log(), q.log())).sum() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-12)
    # Where both are nearly equal, and in float32, no digits are lost
    near = k3(torch.tensor(-1.0), torch.tensor(-1.0 + 2**-12)).item()
    assert near == pytest.approx(2**-25, rel=1e-3)


# --- runs ------------------------------------------------------------------------------------------------------------


def start() -> dict[str, Any]:
    return {"checkpoint": {"load": Parts(path=reference())}}


def test_a_run_that_starts_as_its_reference_has_no_divergence_at_first(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, start(), reference=reference(), kl_weight=0.5)
    assert 0 <= lines[0]["kl"] < 1e-20
    assert lines[0]["loss/kl"] < 1e-20
    assert all(line["kl"] > 1e-6 for line in lines[1:])


def test_the_weight_holds_the_model_near_its_reference(tmp_path: Path) -> None:
    keys = {"reference": reference(), "algorithm": "dapo"}
    free, held = (lines_of(tmp_path / f"{weight}", start(), **keys, kl_weight=weight) for weight in (0.0, 10.0))
    # Without a weight, the divergence is a metric alone: the run is the one without a reference
    plain = lines_of(tmp_path / "plain", start(), algorithm="dapo")
    assert [line["grad_norm"] for line in free] == [line["grad_norm"] for line in plain]
    assert "loss/kl" not in free[1]
    assert held[1]["grad_norm"] != free[1]["grad_norm"]
    assert held[3]["kl"] < 0.8 * free[3]["kl"]
    assert all(line["loss/kl"] == line["kl"] for line in held)  # both are means over tokens, with `dapo`


class Seen(TrainingHook):
    def __init__(self) -> None:
        self.entries: list[Any] = []

    def on_gradients(self, context: Any) -> None:
        self.entries.append([batch.get("reference_log_p") for batch in context.batches])


def test_adapters_off_have_the_numbers_of_a_second_model(tmp_path: Path) -> None:
    """With two updates on the same completions, of which the second takes the log-probabilities of the first."""
    changes = {**start(), "plugins": {"lora": LoRA(rank=2, alpha=16)}}
    seen = Seen()
    one, other = (
        lines_of(tmp_path / name, changes, *hooks, reference=path, kl_weight=0.5, updates=2)
        for name, path, hooks in (("off", "adapters_off", []), ("path", reference(), [seen]))
    )
    for line, expected in zip(one, other, strict=True):
        assert [line[name] for name in ("loss", "grad_norm", "loss/policy", "loss/kl", "kl")] == pytest.approx(
            [expected[name] for name in ("loss", "grad_norm", "loss/policy", "loss/kl", "kl")], rel=1e-9, abs=1e-12
        )
    assert one[0]["kl"] < 1e-20
    assert one[3]["kl"] > 1e-6
    assert [entries[0] is None for entries in seen.entries] == [True, False, True, False]


@define(kw_only=True, slots=False)
class Disturb(TrainingHook):
    """Changes the model after its weights were loaded."""

    def on_train_begin(self, context: Any) -> None:
        for parameter in context.model.parameters():
            parameter.data.mul_(1.1)


def test_another_start_ends_the_run_before_an_update(tmp_path: Path) -> None:
    keys = {"reference": reference(), "kl_weight": 0.5}
    with pytest.raises(ForgeError, match=naming("kl of the first step", "loss.check_first_kl")):
        lines_of(tmp_path / "on", start(), Disturb(), **keys)
    assert not list((tmp_path / "on").rglob("step-*"))
    assert lines_of(tmp_path / "off", {**start(), "steps": 1}, Disturb(), **keys, check_first_kl=False)[0]["kl"] > 1e-6
    # A job that starts from other weights has no known divergence
    assert lines_of(tmp_path / "other", {"steps": 1}, **keys)[0]["kl"] > 1e-6


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        ({"kl_weight": 0.1}, at("loss.kl_weight", "0.1", "loss.reference", "adapters_off")),
        ({"reference": "runs/none"}, at("loss.reference", "runs/none does not exist")),
        ({"reference": "adapters_off"}, at("loss.reference", "the job trains none")),
    ],
)
def test_mistakes_are_named_when_the_job_is_checked(tmp_path: Path, loss: Any, problem: Any) -> None:
    job = tiny_job(str(tmp_path), installed(), **settings(tmp_path, **loss))
    check_problems(problems_of(job), problem)
