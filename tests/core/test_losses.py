"""`cross_entropy` and the vocabulary-parallel reductions, against float64 references on the whole vocabulary."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs.exceptions import FrozenInstanceError
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from forge_core.auxiliary import Auxiliary
from forge_core.contracts.model import Head, VocabShard
from forge_core.contracts.runtime import LossOutput
from forge_core.losses import CrossEntropy
from forge_core.vocab_parallel import vocab_cross_entropy, vocab_mean
from forge_kit.nn.modules import LinearHead
from forge_testing.processes import run_on_ranks

VOCAB, DIM = 37, 12


def make_head(dtype: torch.dtype = torch.float64, bias: bool = False) -> LinearHead:
    torch.manual_seed(1)
    head = LinearHead(DIM, VOCAB, bias=bias).to(dtype)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


def make_batch(ignored: float = 0.3) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states (3, 5, DIM) in float64 and their batch; each label is ignored with probability `ignored`."""
    torch.manual_seed(2)
    hidden = torch.randn(3, 5, DIM, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (3, 5))
    return hidden, {"labels": labels.masked_fill(torch.rand(3, 5) < ignored, -100)}


def build(z_loss: float = 0.0, label_smoothing: float = 0.0) -> tuple[Callable[..., LossOutput], Auxiliary]:
    auxiliary = Auxiliary(torch.device("cpu"))
    return CrossEntropy(z_loss=z_loss, label_smoothing=label_smoothing).build(
        SimpleNamespace(auxiliary=auxiliary)
    ), auxiliary


def reference(logits: Tensor, labels: Tensor, z_loss: float = 0.0, label_smoothing: float = 0.0) -> Tensor:
    """torch's own cross-entropy plus the z-loss, summed over valid positions."""
    settings: dict[str, Any] = {"reduction": "sum", "ignore_index": -100, "label_smoothing": label_smoothing}
    plain = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **settings)
    return plain + z_loss * logits.logsumexp(-1)[labels != -100].square().sum()


def gradients(objective: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(objective, inputs))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_value_and_gradients_equal_the_float64_reference(z_loss: float, bias: bool, label_smoothing: float) -> None:
    head, (hidden, batch) = make_head(bias=bias), make_batch()
    hidden.requires_grad_()
    loss, _ = build(z_loss, label_smoothing)
    output = loss(head, hidden, batch)
    expected = reference(head(hidden), batch["labels"], z_loss, label_smoothing)
    torch.testing.assert_close(output.sum, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        gradients(output.sum, hidden, *head.parameters()),
        gradients(expected, hidden, *head.parameters()),
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-3)])
def test_narrow_hidden_states_give_a_float32_loss(dtype: torch.dtype, tolerance: float) -> None:
    head, (hidden, batch) = make_head(torch.float32), make_batch()
    hidden = hidden.to(dtype)
    output = build(1e-3)[0](head, hidden, batch)
    weight = head.weight.detach().to(dtype).double()
    expected = reference(hidden.double() @ weight.T, batch["labels"], 1e-3)
    assert {t.dtype for t in (output.sum, output.count, *output.per_sequence)} == {torch.float32}
    torch.testing.assert_close(output.sum.double(), expected, rtol=tolerance, atol=0)


def test_bfloat16_gradient_of_a_well_predicted_label_keeps_its_relative_precision() -> None:
    logits = torch.zeros(1, VOCAB).bfloat16()
    logits[0, 3] = 10.0  # p = 0.9984: rounding it to bfloat16 before subtracting 1 would leave nothing
    logits.requires_grad_()
    losses, _ = vocab_cross_entropy(logits, torch.tensor([3]), None)
    (gradient,) = gradients(losses.sum(), logits)
    exact = logits.detach().double().softmax(-1)[0, 3] - 1
    torch.testing.assert_close(gradient[0, 3].double(), exact, rtol=2**-8, atol=0)


def test_counts_and_per_sequence_sums_cover_the_valid_positions_only() -> None:
    head, (hidden, batch) = make_head(), make_batch()
    output = build()[0](head, hidden, batch)
    sums, counts = output.per_sequence
    each = [reference(head(h), y) for h, y in zip(hidden, batch["labels"], strict=True)]
    torch.testing.assert_close(sums, torch.stack(each).detach())
    assert counts.tolist() == (batch["labels"] != -100).sum(-1).tolist()
    assert output.count == counts.sum()
    assert not sums.requires_grad
    torch.testing.assert_close(sums.sum(), output.sum.detach())


def test_z_loss_is_in_the_objective_and_in_the_metrics_but_not_in_the_reported_loss() -> None:
    head, (hidden, batch) = make_head(), make_batch()
    loss, auxiliary = build(z_loss=0.5)
    valid = batch["labels"] != -100
    auxiliary.begin_step(valid.sum(), sequences=3, micro_batches=1)
    output = loss(head, hidden, batch)
    plain = build()[0](head, hidden, batch)
    squares = head(hidden).logsumexp(-1)[valid].square()
    torch.testing.assert_close(output.sum - plain.sum, 0.5 * squares.sum())
    torch.testing.assert_close(output.per_sequence, plain.per_sequence)
    assert auxiliary.totals()["loss/z_loss"].item() == pytest.approx(squares.mean().item())


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_all_labels_ignored_gives_exact_zeros_and_a_valid_backward(z_loss: float) -> None:
    head, (hidden, batch) = make_head(), make_batch(ignored=1.0)
    hidden.requires_grad_()
    output = build(z_loss, label_smoothing=0.1)[0](head, hidden, batch)
    assert output.sum == 0
    assert output.count == 0
    assert all(not gradient.any() for gradient in gradients(output.sum, hidden, head.weight))


def test_any_head_will_do() -> None:
    class Capped:
        vocab_shard = None

        @contextmanager
        def whole(self, dtype: torch.dtype | None = None) -> Any:
            yield (weight,)

        def logits(self, hidden: Tensor) -> Tensor:
            return 5 * torch.tanh(hidden @ weight.T / 5)

    weight, (hidden, batch) = make_head().weight, make_batch()
    assert isinstance(Capped(), Head)
    output = build()[0](Capped(), hidden, batch)
    torch.testing.assert_close(output.sum, reference(Capped().logits(hidden), batch["labels"]))


def test_smoothing_is_in_the_objective_and_in_the_metrics_but_not_in_the_reported_loss() -> None:
    head, (hidden, batch) = make_head(), make_batch()
    loss, auxiliary = build(label_smoothing=0.25)
    valid = batch["labels"] != -100
    auxiliary.begin_step(valid.sum(), sequences=3, micro_batches=1)
    output = loss(head, hidden, batch)
    plain = build()[0](head, hidden, batch)
    uniform = -head(hidden).log_softmax(-1).mean(-1)[valid]
    torch.testing.assert_close(output.sum, 0.75 * plain.sum + 0.25 * uniform.sum())
    torch.testing.assert_close(output.per_sequence, plain.per_sequence)
    assert auxiliary.totals()["loss/uniform"].item() == pytest.approx(uniform.mean().item())


def test_values_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="label_smoothing"):
        CrossEntropy(label_smoothing=1.0)
    with pytest.raises(ValueError, match="z_loss"):
        CrossEntropy(z_loss=-1.0)
    with pytest.raises(FrozenInstanceError):
        CrossEntropy().z_loss = 1.0  # type: ignore[misc]


def test_reading_the_component_needs_no_torch() -> None:
    code = "import sys, forge_core.losses, forge_core.schedules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- vocabulary-parallel --------------------------------------------------------------------------------------------


def test_an_unsharded_mean_passes_gradcheck() -> None:
    logits = torch.randn(4, VOCAB, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: vocab_mean(x, None), (logits,))


def sharded_results(rank: int) -> dict[str, Any]:
    """Values and gradients of every reduction on this rank's slice; the vocabulary is split unequally."""
    torch.manual_seed(3)
    logits, labels = torch.randn(3, 4, VOCAB, dtype=torch.float64) * 30, torch.randint(0, VOCAB, (3, 4))
    bounds = [0, 10, VOCAB]
    shard = VocabShard(dist.group.WORLD, bounds[rank], bounds[rank + 1] - bounds[rank])
    local = logits[..., bounds[rank] : bounds[rank + 1]].clone().requires_grad_()
    weights = torch.rand(3, 4, dtype=torch.float64)
    results: dict[str, Any] = {"slice": (bounds[rank], bounds[rank + 1])}
    outputs = {
        "mean": vocab_mean(local, shard),
        "cross_entropy": vocab_cross_entropy(local, labels, shard)[0],
        "normaliser": vocab_cross_entropy(local, labels, shard)[1],
    }
    for name, value in outputs.items():
        results[name] = (value.detach(), gradients((value * weights).sum(), local)[0])
    results["inputs"] = (logits, labels, weights)
    return results


def test_sharded_reductions_equal_the_unsharded_ones_with_their_gradients() -> None:
    for results in run_on_ranks(2, sharded_results):
        logits, labels, weights = results["inputs"]
        logits.requires_grad_()
        gathered = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        expected = {
            "mean": logits.mean(-1),
            "cross_entropy": logits.logsumexp(-1) - gathered,
            "normaliser": logits.logsumexp(-1),
        }
        for name, value in expected.items():
            (gradient,) = torch.autograd.grad((value * weights).sum(), logits, retain_graph=True)
            part = gradient[..., slice(*results["slice"])]
            torch.testing.assert_close(results[name], (value.detach(), part), rtol=1e-12, atol=1e-12, msg=name)


def sharded_loss(rank: int) -> dict[str, Tensor]:
    """The loss of a head that holds its slice of the rows, on hidden states that every rank has."""
    whole, (hidden, batch) = make_head(), make_batch()
    start, stop = (0, 10) if rank == 0 else (10, VOCAB)
    head = LinearHead(DIM, stop - start).double()
    head.weight.data.copy_(whole.weight[start:stop])
    head.vocab_shard = VocabShard(dist.group.WORLD, start, stop - start)
    output = build(z_loss=1e-2, label_smoothing=0.1)[0](head, hidden.requires_grad_(), batch)
    to_hidden, to_weight = gradients(output.sum, hidden, head.weight)
    return {"sum": output.sum.detach(), "hidden": to_hidden, "weight": to_weight}


def test_sharded_head_gives_the_same_loss_and_its_part_of_the_gradients() -> None:
    first, second = run_on_ranks(2, sharded_loss)
    head, (hidden, batch) = make_head(), make_batch()
    expected = reference(head(hidden.requires_grad_()), batch["labels"], 1e-2, 0.1)
    to_hidden, to_weight = gradients(expected, hidden, head.weight)
    torch.testing.assert_close(first["sum"], expected.detach())
    torch.testing.assert_close(second["sum"], expected.detach())
    torch.testing.assert_close(first["hidden"] + second["hidden"], to_hidden)
    torch.testing.assert_close(torch.cat([first["weight"], second["weight"]]), to_weight)
