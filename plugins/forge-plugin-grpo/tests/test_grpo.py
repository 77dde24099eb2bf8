"""What is drawn, scored and learned; against the published formulas, written out here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from grpo_runs import Even, lines_of, reference, settings
from torch import Tensor

from forge_core import JobError, TrainingHook
from forge_core.engine.build import build_context
from forge_plugin_checkpoints import Parts
from forge_plugin_grpo import GRPO, Answer, EngineRollout, RewardComponent, Rewards
from forge_plugin_grpo.advantages import ADVANTAGES
from forge_plugin_grpo.objective import objective
from forge_plugin_lora import LoRA
from forge_testing import TinyModel, tiny_job
from forge_testing.catalogs import installed
from forge_testing.laws import Case, Interrupted, layout_law, resumption_law
from forge_testing.refusals import at, check_problems, naming, problems_of

ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "rloo")


# --- formulas ---------------------------------------------------------------------------------------------------------


def written_out(algorithm: str, log_p: Tensor, old: Tensor, valid: Tensor, a: Tensor, most: int) -> Tensor:
    """The mean objective of one batch of completions, (N, T), by loops over the papers' sums."""
    terms, tokens = [], 0
    for n in range(len(log_p)):
        length = int(valid[n].sum())
        ratios = [(log_p[n, t] - old[n, t]).exp() for t in range(valid.shape[1]) if valid[n, t]]
        if algorithm == "gspo":
            s = (sum((log_p[n] - old[n])[valid[n]]) / length).exp()
            terms.append(torch.minimum(s * a[n], s.clamp(0.8, 1.3) * a[n]))
            continue
        if algorithm == "rloo":
            terms.append(torch.stack(ratios).prod() * a[n])
            continue
        clipped = [torch.minimum(r * a[n], r.clamp(0.8, 1.3) * a[n]) for r in ratios]
        tokens += length
        terms.append(sum(clipped) / {"grpo": length, "dr_grpo": most, "dapo": 1}[algorithm])
    return -sum(terms) / (tokens if algorithm == "dapo" else len(terms))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_objectives_are_the_published_ones(algorithm):
    generator = torch.Generator().manual_seed(3)
    log_p = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64).requires_grad_()
    old = log_p.detach() - 0.4 + 0.8 * torch.randn(log_p.shape, generator=generator, dtype=torch.float64)
    valid = torch.rand(log_p.shape, generator=generator) < 0.7
    valid[..., 0] = True
    a = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    loss = GRPO(rewards={"one": Even()}, algorithm=algorithm, group=3, max_tokens=7, clip_low=0.2, clip_high=0.3)
    result = objective(loss, log_p.where(valid, 0), old.where(valid, 0), valid, a)
    count = {"example": 6, "token": int(valid.sum())}[result.unit]
    expected = written_out(algorithm, log_p.flatten(0, 1), old.flatten(0, 1), valid.flatten(0, 1), a.flatten(), 7)
    assert (result.sum / count).item() == pytest.approx(expected.item(), rel=1e-12)
    ours = torch.autograd.grad(result.sum / count, log_p)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(expected, log_p)[0], rtol=1e-10, atol=1e-14)
    if algorithm == "grpo":
        ratio = (log_p - old).exp()
        out = torch.where(a[..., None] > 0, ratio > 1.3, ratio < 0.8) & valid
        assert result.clipped == out.sum() > 0


def test_advantages_are_the_published_ones():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 5.0, 3.0, 4.0]], dtype=torch.float64)
    standard = [(r - row.mean()) / (row.std() + 1e-4) for row in rewards for r in row]
    centred = [r - row.mean() for row in rewards for r in row]
    others = [r - (row.sum() - r) / 3 for row in rewards for r in row]
    for name, expected in {
        "grpo": standard,
        "dapo": standard,
        "gspo": standard,
        "dr_grpo": centred,
        "rloo": others,
    }.items():
        torch.testing.assert_close(ADVANTAGES[name](rewards).flatten(), torch.stack(expected))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_gradient_of_the_first_update_is_the_policy_gradient(tmp_path, algorithm):
    """Old and new log-probabilities are equal to the bit, so every ratio is 1, and nothing is clipped."""
    lines = lines_of(tmp_path, {}, algorithm=algorithm)
    assert all(line["policy/clipped"] == 0 for line in lines)
    # In float64 the sampler, with its cache, and the trainer agree
    assert all(line["rollout/log_p_difference"] < 1e-12 for line in lines)
    assert any(line["grad_norm"] > 0 for line in lines)


def test_in_bfloat16_sampler_and_trainer_are_close(tmp_path):
    lines = lines_of(tmp_path, {"precision": "bf16"})
    assert all(0 < line["rollout/log_p_difference"] < 3e-3 for line in lines)


# --- rows -------------------------------------------------------------------------------------------------------------


class Seen(TrainingHook):
    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_gradients(self, context: Any) -> None:
        self.batches.append([dict(batch) for batch in context.batches])


def test_a_row_has_the_completions_of_its_prompt(tmp_path):
    seen = Seen()
    lines = lines_of(tmp_path, {"steps": 1}, seen)
    [batch] = seen.batches[0]
    ids, labels = (batch[name].view(8, 4, 12) for name in ("input_ids", "labels"))
    texts = {f"{n}+1=" for n in range(12) if n % 6}
    rewards = []
    for row in range(8):
        prompts = set()
        for place in range(4):
            learned = (labels[row, place] >= 0).nonzero()[:, 0]
            begin, end = int(learned[0]) + 1, int(learned[-1]) + 1
            prompts.add(bytes(ids[row, place, :begin].tolist()).decode())
            completion = labels[row, place, begin - 1 : end].tolist()
            assert completion[:-1] == ids[row, place, begin:end].tolist()
            assert len(completion) == 5 or completion[-1] == 256
            rewards.append(sum(id_ % 2 == 0 for id_ in completion) / len(completion))
        assert len(prompts) == 1
        assert prompts <= texts
    assert lines[0]["reward"] == pytest.approx(sum(rewards) / 32)
    assert lines[0]["reward/even"] == lines[0]["reward"]
    assert batch["positions"].view(8, 4, 12).equal(torch.arange(12).expand(8, 4, 12))
    torch.testing.assert_close(
        batch["advantages"], ADVANTAGES["grpo"](torch.tensor(rewards, dtype=torch.float64).view(8, 4))
    )


def test_several_updates_use_the_same_completions(tmp_path):
    seen = Seen()
    lines = lines_of(tmp_path, {}, seen, updates=2, clip_low=1e-4, clip_high=1e-4)
    first, second, third, _ = (batches[0] for batches in seen.batches)
    assert first["input_ids"].equal(second["input_ids"])
    assert not first["input_ids"].equal(third["input_ids"])
    assert [line["policy/clipped"] > 0 for line in lines] == [False, True, False, True]


# --- layouts, resuming ------------------------------------------------------------------------------------------------


def observation(compared: bool = False, plugins: Any = None, **loss: Any) -> Any:
    """An `observe` of `Case`; `compared`: of two steps, with the KL divergence from the weights before them."""

    def observe(folder: Path, changes: Any) -> list[tuple[float, ...]]:
        if compared:
            loss.setdefault("reference", reference())
            start = {"load": Parts(path=reference())}
            changes = {**changes, "checkpoint": start, "plugins": plugins, "steps": 2}
        names = ("loss", "grad_norm", "loss/policy", "rollout/log_p_difference", "reward", "completions/tokens")
        names = (*names, "redraws", "redraws/equal", "kl", "loss/kl", "policy/clipped")
        changes = {**changes, "evaluations": {"rewards": Rewards(temperature=0.8)}}
        lines = lines_of(folder, changes, **loss)
        records = map(json.loads, next(folder.rglob("metrics.jsonl")).read_text().splitlines())
        evaluated = [record["eval/reward"] for record in records if "eval/reward" in record]
        return [*(tuple(line.get(name, 0.0) for name in names) for line in lines), tuple(evaluated)]

    return observe


def same(ranks: Any, alone: Any) -> None:
    assert len({line[4] for line in alone[:-1]}) > 1
    assert len(alone[-1]) == 1
    for found, expected in zip(ranks[0], alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@frozen(kw_only=True)
class Rare(RewardComponent):
    """1 for completions that few draws are: most groups have one reward."""

    def score(self, completion: Any) -> float:
        return float(completion.ids[0] % 8 == 0)


REDRAWN = {"rewards": {"rare": Rare()}, "dynamic_sampling": 2}


def test_groups_without_a_spread_are_replaced_by_other_prompts(tmp_path):
    """The rows that have a spread stay to the bit, and the position in the data does too."""
    before, after, whole = Seen(), Seen(), Seen()
    changes = {"steps": 1}
    plain = lines_of(tmp_path / "plain", changes, before, rewards={"rare": Rare()})
    few = lines_of(tmp_path / "few", changes, after, **REDRAWN)
    many = lines_of(tmp_path / "many", changes, whole, **{**REDRAWN, "dynamic_sampling": 60})
    learned = [(run.batches[0][0]["advantages"] != 0).any(1) for run in (before, after, whole)]
    assert 0 < learned[0].sum() < learned[1].sum() < 8
    assert learned[2].all()
    assert not (learned[0] & ~learned[1]).any()
    first, second, third = (run.batches[0][0]["input_ids"] for run in (before, after, whole))
    assert first[learned[0]].equal(second[learned[0]])
    assert second[learned[1]].equal(third[learned[1]])  # further draws begin with the same ones
    prompts = [{bytes(row[:4].tolist()) for row in ids[~learned[0]]} for ids in (first, second)]
    assert prompts[0] != prompts[1]
    # What is logged of rewards is of the first draw, which no selection biases
    assert plain[0]["reward"] == few[0]["reward"] == many[0]["reward"]
    assert few[0]["reward/equal"] == 1 - learned[0].sum() / 8
    assert few[0]["redraws/equal"] == 1 - learned[1].sum() / 8
    assert few[0]["redraws"] == (8 - learned[0].sum() + 8 - _learned_after_one(tmp_path).sum()) / 8
    assert many[0]["redraws/equal"] == 0
    assert "redraws" not in plain[0]


def _learned_after_one(folder: Path) -> Tensor:
    seen = Seen()
    lines_of(folder / "one", {"steps": 1}, seen, **{**REDRAWN, "dynamic_sampling": 1})
    return (seen.batches[0][0]["advantages"] != 0).any(1)


def near_start(algorithm: str, layouts: tuple[str, ...]) -> Case:
    """Two updates on the same completions, held near the weights that the run starts from."""
    observe = observation(True, {}, algorithm=algorithm, updates=2, kl_weight=0.5)
    return Case(f"{algorithm}, kl", observe=observe, compare=same, layouts=layouts)


ADAPTERS = {"lora": LoRA(rank=2, alpha=16)}
OFF = observation(True, ADAPTERS, reference="adapters_off", kl_weight=0.5, updates=2)
test_layouts = layout_law(
    Case("grpo", observe=observation(), compare=same, layouts=("fsdp2_tp2",)),
    Case("redraws", observe=observation(**REDRAWN), compare=same, layouts=("fsdp2",)),
    near_start("grpo", ("pp2", "cp2")),
    *(near_start(algorithm, ("cp2",)) for algorithm in ("dr_grpo", "dapo", "gspo")),
    Case("adapters off", observe=OFF, compare=same, layouts=("pp2", "cp2")),
)


def interrupted_job() -> dict[str, Any]:
    import tempfile

    return settings(Path(tempfile.gettempdir()) / "forge-grpo-prompts", updates=2)


test_resumption = resumption_law(Interrupted("grpo", changes=interrupted_job))


# --- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "changes", "problem"),
    [
        ({"group": 5}, {}, at("loss.group", 5, 48)),
        ({"max_tokens": 12}, {}, at("loss.max_tokens", 12)),
        ({"rewards": {"one": Answer(pattern="(")}}, {}, at("loss.rewards.one.pattern", "(")),
        ({"rewards": {"one": Answer(pattern="a")}}, {}, at("loss.rewards.one.pattern", "a")),
    ],
)
def test_mistakes_are_named_when_the_job_is_checked(tmp_path, loss, changes, problem):
    job = tiny_job(str(tmp_path), installed(), **{**settings(tmp_path, **loss), **changes})
    check_problems(problems_of(job), problem)


def test_the_rollout_is_a_component(tmp_path):
    """Greedy completions of a group are all alike, so nothing is learned."""
    with pytest.warns(UserWarning, match="nothing is learned"):
        lines = lines_of(tmp_path, {"steps": 1}, rollout=EngineRollout(top_k=1))
    assert lines[0]["reward/equal"] == 1
    assert lines[0]["grad_norm"] == 0


class Leaking(torch.nn.Module):
    """Adds to each position the mean of all before it, whichever completion they are of."""

    def forward(self, carry: Any, batch: Any) -> Any:
        (x,) = carry
        return (x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None],)


@frozen(kw_only=True)
class LeakingModel(TinyModel):
    def build(self, context: Any) -> Any:
        model = super().build(context)
        model.layers[str(len(model.layers))] = Leaking()
        return model


def test_a_model_in_which_completions_see_each_other_is_refused(tmp_path):
    job = tiny_job(str(tmp_path), installed(), **{**settings(tmp_path), "model": LeakingModel()})
    context = build_context(job, installed(), None)
    with pytest.raises(JobError, match=naming("completions", "layers.2")):
        job.loss.build(context)
