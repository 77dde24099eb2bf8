"""`chunked_cross_entropy` against the float64 cross-entropy of all logits, and what it may hold and compute."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.auxiliary import Auxiliary
from forge_core.contracts.model import VocabShard
from forge_core.contracts.runtime import LossFunction, LossOutput
from forge_core.losses import CrossEntropy
from forge_kit.nn.modules import LinearHead
from forge_plugin_losses import ChunkedCrossEntropy, vocabulary_chunks
from forge_testing.processes import run_on_ranks

BATCH, SEQUENCE, DIM, VOCAB = 3, 7, 16, 50


class CappedHead(LinearHead):
    """Not linear: soft-capped logits, as in Gemma 2."""

    def logits(self, hidden: Tensor) -> Tensor:
        return 5 * torch.tanh(super().logits(hidden) / 5)


HEADS = {
    "linear": lambda: LinearHead(DIM, VOCAB),
    "linear with bias": lambda: LinearHead(DIM, VOCAB, bias=True),
    "capped": lambda: CappedHead(DIM, VOCAB),
    "capped with bias": lambda: CappedHead(DIM, VOCAB, bias=True),
}
every_head = pytest.mark.parametrize("head_name", HEADS)


def make_head(name: str = "linear", dtype: torch.dtype = torch.float64) -> LinearHead:
    torch.manual_seed(1)
    head = HEADS[name]().to(dtype)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


def make_batch(ignored: float = 0.3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(2)
    hidden = torch.randn(BATCH, SEQUENCE, DIM, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (BATCH, SEQUENCE))
    return hidden, {"labels": labels.masked_fill(torch.rand(BATCH, SEQUENCE) < ignored, -100)}


def make_loss(
    chunk_tokens: int = 4, z_loss: float = 0.0, auxiliary: Auxiliary | None = None, label_smoothing: float = 0.0
) -> LossFunction:
    context = SimpleNamespace(auxiliary=auxiliary or Auxiliary(torch.device("cpu")))
    return ChunkedCrossEntropy(chunk_tokens=chunk_tokens, z_loss=z_loss, label_smoothing=label_smoothing).build(context)


def reference(logits: Tensor, labels: Tensor, z_loss: float = 0.0, label_smoothing: float = 0.0) -> Tensor:
    settings = {"reduction": "sum", "ignore_index": -100, "label_smoothing": label_smoothing}
    plain = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **settings)
    return plain + z_loss * logits.logsumexp(-1)[labels != -100].square().sum()


def gradients(objective: Tensor, hidden: Tensor, head: LinearHead) -> list[Tensor]:
    return list(torch.autograd.grad(objective / 3, (hidden, *head.parameters())))


@every_head
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_value_and_gradients_equal_the_float64_reference(head_name: str, z_loss: float, label_smoothing: float) -> None:
    head, (hidden, batch) = make_head(head_name), make_batch()
    output = make_loss(z_loss=z_loss, label_smoothing=label_smoothing)(head, hidden, batch)
    with head.whole():
        expected = reference(head.logits(hidden), batch["labels"], z_loss, label_smoothing)
    torch.testing.assert_close(output.sum, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        gradients(output.sum, hidden, head), gradients(expected, hidden, head), rtol=1e-9, atol=1e-12
    )


@every_head
@pytest.mark.parametrize(("dtype", "value", "gradient"), [(torch.float32, 1e-6, 1e-5), (torch.bfloat16, 1e-3, 1e-2)])
def test_narrow_dtypes_stay_close_to_float64(head_name: str, dtype: torch.dtype, value: float, gradient: float) -> None:
    """Within `value` of the loss and `gradient` of each gradient's norm, from weights rounded alike."""
    head, (hidden, batch) = make_head(head_name, torch.float32), make_batch(dtype=dtype)
    output = make_loss(z_loss=1e-3, label_smoothing=0.1)(head, hidden, batch)
    exact_head, exact_hidden = make_head(head_name), hidden.detach().double().requires_grad_()
    for exact, parameter in zip(exact_head.parameters(), head.parameters(), strict=True):
        exact.data = parameter.data.to(dtype).double()
    with exact_head.whole():
        expected = reference(exact_head.logits(exact_hidden), batch["labels"], 1e-3, 0.1)
    assert {t.dtype for t in (output.sum, output.count, *output.per_sequence)} == {torch.float32}
    torch.testing.assert_close(output.sum.double(), expected, rtol=value, atol=0)
    for narrow, wide in zip(
        gradients(output.sum, hidden, head), gradients(expected, exact_hidden, exact_head), strict=True
    ):
        assert (narrow.double() - wide).norm() < gradient * wide.norm()


def test_bfloat16_gradient_of_well_predicted_labels_is_not_lost_to_rounding() -> None:
    head = LinearHead(DIM, VOCAB)
    torch.nn.init.zeros_(head.weight)
    head.weight.data[3, 0] = 10.0
    hidden = torch.eye(1, DIM)[None].bfloat16().requires_grad_()  # p of label 3 is 0.998, which rounds to 1
    output = make_loss()(head, hidden, {"labels": torch.tensor([[3]])})
    (gradient,) = torch.autograd.grad(output.sum, hidden)
    expected = 10 * (torch.eye(VOCAB, dtype=torch.float64)[3] * 10).softmax(-1)[3] - 10
    torch.testing.assert_close(gradient[0, 0, 0].double(), expected, rtol=2**-7, atol=0)


@given(
    chunk=st.integers(1, 2 * BATCH * SEQUENCE),
    z_loss=st.sampled_from([0.0, 0.1]),
    label_smoothing=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=25, deadline=None)
def test_the_chunk_size_changes_nothing(chunk: int, z_loss: float, label_smoothing: float) -> None:
    head, (hidden, batch) = make_head(), make_batch()
    whole = make_loss(BATCH * SEQUENCE, z_loss, label_smoothing=label_smoothing)(head, hidden, batch)
    output = make_loss(chunk, z_loss, label_smoothing=label_smoothing)(head, hidden, batch)
    torch.testing.assert_close(output.sum, whole.sum, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        gradients(output.sum, hidden, head), gradients(whole.sum, hidden, head), rtol=1e-9, atol=0
    )


@every_head
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_all_labels_ignored_gives_exact_zeros_and_a_valid_backward(head_name: str, z_loss: float) -> None:
    head, (hidden, batch) = make_head(head_name), make_batch(ignored=1.0)
    output = make_loss(z_loss=z_loss, label_smoothing=0.1)(head, hidden, batch)
    assert output.sum == 0
    assert output.count == 0
    assert all(not gradient.any() for gradient in gradients(output.sum, hidden, head))


def test_reports_are_those_of_the_core_loss() -> None:
    head, (hidden, batch) = make_head(), make_batch()
    outputs: list[LossOutput] = []
    settings = {"z_loss": 0.5, "label_smoothing": 0.1}
    for component in (CrossEntropy(**settings), ChunkedCrossEntropy(chunk_tokens=4, **settings)):
        auxiliary = Auxiliary(torch.device("cpu"))
        auxiliary.begin_step((batch["labels"] != -100).sum(), sequences=BATCH, micro_batches=1)
        outputs.append(component.build(SimpleNamespace(auxiliary=auxiliary))(head, hidden, batch))
        outputs[-1] = (*outputs[-1], *(auxiliary.totals()[f"loss/{name}"] for name in ("z_loss", "uniform")))
    torch.testing.assert_close(outputs[0], outputs[1])


@every_head
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_gives_the_same_value_and_leaves_training_as_it_was(head_name: str, mode: Any) -> None:
    head, (hidden, batch) = make_head(head_name), make_batch()
    expected = make_loss(z_loss=1e-2)(head, hidden, batch)
    loss = make_loss(z_loss=1e-2)
    with mode():
        evaluated = loss(head, hidden, batch)
    assert not evaluated.sum.requires_grad
    assert evaluated.sum == expected.sum.detach()
    trained = loss(head, hidden, batch)
    assert trained.sum == expected.sum
    torch.testing.assert_close(gradients(trained.sum, hidden, head), gradients(expected.sum, hidden, head))


@every_head
@pytest.mark.parametrize("frozen", ["head", "hidden"])
def test_frozen_parts_get_no_gradient_and_the_others_the_same(head_name: str, frozen: str) -> None:
    head, (hidden, batch) = make_head(head_name), make_batch()
    inputs = {"hidden": [hidden], "head": list(head.parameters())}
    trained = inputs["hidden" if frozen == "head" else "head"]
    expected = torch.autograd.grad(make_loss()(head, hidden, batch).sum, trained)
    for tensor in inputs[frozen]:
        tensor.requires_grad_(False)
    torch.testing.assert_close(torch.autograd.grad(make_loss()(head, hidden, batch).sum, trained), expected)


def test_micro_batches_in_flight_do_not_share_gradients() -> None:
    head, (hidden, batch) = make_head(), make_batch()
    loss = make_loss()
    expected = gradients(loss(head, hidden, batch).sum, hidden, head)
    first = loss(head, hidden, batch)
    loss(head, hidden.detach() + 1, batch)
    torch.testing.assert_close(gradients(first.sum, hidden, head), expected)


class Watch(TorchDispatchMode):
    """Counts operations, and remembers the largest tensor that any of them gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@every_head
def test_never_holds_more_logits_than_a_chunk_forward_or_backward(head_name: str) -> None:
    head = CappedHead(DIM, 512) if "capped" in head_name else LinearHead(DIM, 512)
    torch.nn.init.normal_(head.weight)
    hidden, batch = make_batch()
    with Watch() as watch:
        make_loss(chunk_tokens=2)(head, hidden.float().detach().requires_grad_(), batch).sum.backward()
    assert watch.largest == max(DIM * 512, 2 * 512)


@every_head
def test_a_large_vocabulary_has_fewer_positions_in_a_chunk(head_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, bytes_per_chunk = 300_000, 1 << 26
    monkeypatch.setitem(vocabulary_chunks.LOGITS_BYTES, "cpu", bytes_per_chunk)
    head = CappedHead(2, vocabulary) if "capped" in head_name else LinearHead(2, vocabulary)
    torch.nn.init.normal_(head.weight)
    hidden = torch.randn(1, 200, 2, requires_grad=True)
    with Watch() as watch:
        make_loss(chunk_tokens=0)(head, hidden, {"labels": torch.zeros(1, 200, dtype=torch.int64)}).sum.backward()
    assert 0.9 * bytes_per_chunk < 4 * watch.largest <= bytes_per_chunk
    assert vocabulary_chunks.default_chunk_tokens(torch.device("cpu"), 10**8) == vocabulary_chunks.FEWEST_CHUNK_TOKENS


def test_computes_three_products_a_chunk_to_train_and_one_to_evaluate() -> None:
    head, (hidden, batch) = make_head(), make_batch()
    chunks = -(-int((batch["labels"] != -100).sum()) // 4)
    with Watch() as training:
        make_loss(chunk_tokens=4)(head, hidden, batch).sum.backward()
    with Watch() as evaluation, torch.no_grad():
        make_loss(chunk_tokens=4)(head, hidden, batch)
    assert training.calls["mm"] + training.calls["addmm_"] == 3 * chunks
    assert evaluation.calls["mm"] == chunks


@every_head
def test_gathers_the_head_once_for_all_chunks(head_name: str) -> None:
    head, (hidden, batch) = make_head(head_name), make_batch()
    gathered = []
    inner = head.whole

    @contextmanager
    def whole(dtype: torch.dtype | None = None) -> Iterator[Sequence[Tensor]]:
        gathered.append(dtype)
        with inner(dtype) as weights:
            yield weights

    head.whole = whole
    make_loss(chunk_tokens=2)(head, hidden, batch).sum.backward()
    assert gathered == [torch.float64]


def test_a_run_has_the_same_curve_as_with_the_loss_of_the_core(make_job: Any, train: Any, lines: Any) -> None:
    curves, settings = [], {"z_loss": 1e-3, "label_smoothing": 0.1}
    for loss in (CrossEntropy(**settings), ChunkedCrossEntropy(chunk_tokens=5, **settings)):
        job = make_job(steps=4, micro_batch_size=2, loss=loss, job={"name": type(loss).__name__})
        curves.append(
            [(line["loss"], line["grad_norm"], line["loss/z_loss"], line["loss/uniform"]) for line in lines(train(job))]
        )
    assert curves[1] == [pytest.approx(line, rel=1e-5) for line in curves[0]]


def test_a_replaced_logits_method_is_honoured() -> None:
    head, (hidden, batch) = make_head(), make_batch()
    inner = head.logits
    head.logits = lambda hidden: 2 * inner(hidden)
    with head.whole():
        expected = reference(head.logits(hidden), batch["labels"])
    torch.testing.assert_close(make_loss()(head, hidden, batch).sum, expected)


def test_bad_keys_are_refused_by_name() -> None:
    for keys in ({"chunk_tokens": -1}, {"z_loss": -0.1}, {"label_smoothing": 1.0}):
        with pytest.raises(ValueError, match=next(iter(keys))):
            ChunkedCrossEntropy(**keys)


def test_importing_the_plugin_needs_no_torch() -> None:
    code = "import sys, forge_plugin_losses; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- a vocabulary split over two ranks ------------------------------------------------------------------------------


def test_a_split_vocabulary_gives_the_same_loss_and_each_rank_its_part_of_the_gradients() -> None:
    parts = run_on_ranks(2, sharded_loss)
    head, (hidden, batch) = make_head(), make_batch()
    expected = reference(head(hidden), batch["labels"], 1e-2, 0.1)
    to_hidden, to_weight = gradients(expected, hidden, head)
    for part in parts:
        torch.testing.assert_close(part["sum"], expected.detach())
    torch.testing.assert_close(parts[0]["hidden"] + parts[1]["hidden"], to_hidden)
    torch.testing.assert_close(torch.cat([part["weight"] for part in parts]), to_weight)


def sharded_loss(rank: int) -> dict[str, Tensor]:
    whole, (hidden, batch) = make_head(), make_batch()
    start, stop = [(0, 13), (13, VOCAB)][rank]
    head = LinearHead(DIM, stop - start).double()
    head.weight.data.copy_(whole.weight[start:stop])
    head.vocab_shard = VocabShard(dist.group.WORLD, start, stop - start)
    output = make_loss(z_loss=1e-2, label_smoothing=0.1)(head, hidden, batch)
    to_hidden, to_weight = gradients(output.sum, hidden, head)
    return {"sum": output.sum.detach(), "hidden": to_hidden, "weight": to_weight}


@pytest.mark.parametrize(("ignored", "share"), [(0.0, 1.0), (0.6, None), (1.0, 1.0)])
def test_positions_without_a_label_are_left_out(ignored, share):
    """Unless there are few of them, or nothing else."""

    class Counting(CappedHead):
        rows = 0

        def logits(self, hidden):
            self.rows += len(hidden)
            return super().logits(hidden)

    head = Counting(DIM, VOCAB).double()
    torch.nn.init.normal_(head.weight)
    hidden, batch = make_batch(ignored)
    make_loss()(head, hidden, batch)
    learned = int((batch["labels"] != -100).sum())
    assert head.rows == (BATCH * SEQUENCE if share else learned)
    assert share or 0 < learned < BATCH * SEQUENCE
