"""Training on packed sequences is training on each document by itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import numpy as np
import pytest
import torch
from attrs import frozen
from torch import Tensor

from forge_core.contracts.components import DatasetComponent
from forge_core.contracts.errors import DataError, JobError
from forge_core.data.reading import collate
from forge_core.engine.build import Run
from forge_core.engine.trainer import Trainer
from forge_kit.data.document_streams import StreamedDocument
from forge_kit.data.document_streams import packed as packed_stream
from forge_plugin_compile import Compile
from forge_plugin_text.packing import BestFit, Isolate
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_plugin_transformer.modules import segment_attention
from forge_testing import Numbers, tiny_job
from forge_testing.documents import ListedDocuments, RandomDocuments
from forge_testing.laws import Case, Interrupted, layout_law, resumption_law
from forge_testing.outcomes import Stop
from forge_testing.refusals import lacks, refuses

SEQ_LEN = 24
PACKINGS = [Isolate(), BestFit()]
WAYS = [("flash", "mask"), ("flash", "segments"), ("gemm", "segments"), ("math", "mask")]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only short documents go together."""
    monkeypatch.setattr(segment_attention, "TOGETHER", 12)


def model(backend: str = "auto", documents: str = "auto") -> Transformer:
    """Grouped queries, normalised queries and keys, several layers, and weights that make attention matter."""
    attention = GroupedQueryAttention(heads=4, kv_heads=2, qk_norm=True, backend=backend, documents=documents)
    return Transformer(dim=16, layers=3, vocab_size=32, init_std=0.3, attention=attention)


@pytest.fixture
def packed(make_job: Callable[..., Any], build: Callable[..., Run]) -> Callable[..., Run]:
    """A built run on random documents, some of them longer than a sequence."""

    def run(packing: Any, backend: str, documents: str, precision: str = "fp64") -> Run:
        data = {"sources": (RandomDocuments(longest=60, count=12),), "packing": packing}
        job = make_job(model=model(backend, documents), seq_len=SEQ_LEN, precision=precision, data=data)
        return build(job)

    return run


def fragments(packing: Any) -> Iterator[np.ndarray]:
    """What there is of each document in each sequence, with the token after it, from the documents themselves."""
    documents = RandomDocuments(longest=60, count=12).build(None)
    whole = SEQ_LEN * ((len(documents) - 1) // SEQ_LEN)
    for start, stop in pairwise([0, *documents.ends().tolist()]):
        if isinstance(packing, BestFit):
            cuts = range(start, stop - 1, SEQ_LEN)
            last = stop - 1
        else:
            cuts = sorted({start, *range(-(-start // SEQ_LEN) * SEQ_LEN, min(stop - 1, whole), SEQ_LEN)})
            last = min(stop - 1, whole)
        for first, end in pairwise([*cuts, last]):
            if end > first:
                yield documents.tokens(first, end + 1)


def gradients(run: Run, batches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss sum, number of labels, and gradients of the sum, over these micro-batches."""
    for parameter in run.model.parameters():
        parameter.grad = None
    output = run.executor.train_step(batches, torch.ones((), dtype=torch.float64))
    return output.loss_sum, output.count, {name: p.grad for name, p in run.model.named_parameters()}


def batches(run: Run, size: int) -> list[dict[str, Tensor]]:
    """All sequences, in micro-batches."""
    (dataset,) = run.datasets
    rows = [dataset[index] for index in range(len(dataset))]
    return [collate(rows[start : start + size]) for start in range(0, len(rows), size)]


def one_by_one(packing: Any) -> list[dict[str, Tensor]]:
    """Each fragment as a batch of one sequence."""
    tokens = [torch.from_numpy(fragment)[None] for fragment in fragments(packing)]
    return [{"input_ids": row[:, :-1], "labels": row[:, 1:]} for row in tokens]


def assert_equal(found: Any, expected: Any, tolerance: float) -> None:
    """Relative to the largest element of each tensor."""
    assert found[1] == expected[1]
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=0)
    for name, grad in found[2].items():
        error = (grad - expected[2][name]).abs().max() / expected[2][name].abs().max()
        assert error < tolerance, name


@pytest.mark.parametrize(("backend", "documents"), WAYS)
@pytest.mark.parametrize("packing", PACKINGS, ids=["isolate", "best_fit"])
def test_loss_and_gradients_are_those_of_the_documents_one_by_one(
    packed: Callable[..., Run], packing: Any, backend: str, documents: str
) -> None:
    run = packed(packing, backend, documents)
    expected = gradients(run, one_by_one(packing))
    for micro_batch_size in (3, 100):
        assert_equal(gradients(run, batches(run, micro_batch_size)), expected, 1e-10)


@pytest.mark.parametrize(("backend", "documents"), WAYS)
@pytest.mark.parametrize("packing", PACKINGS, ids=["isolate", "best_fit"])
def test_in_single_precision_too(packed: Callable[..., Run], packing: Any, backend: str, documents: str) -> None:
    run = packed(packing, backend, documents, precision="fp32")
    assert_equal(gradients(run, batches(run, 4)), gradients(run, one_by_one(packing)), 2e-4)


@pytest.mark.parametrize(("backend", "documents"), WAYS)
@torch.no_grad()
def test_logits_are_those_of_the_documents_one_by_one(packed: Callable[..., Run], backend: str, documents: str) -> None:
    run = packed(BestFit(), backend, documents)
    (batch,) = batches(run, 1000)
    logits = run.model.head.logits(run.model(batch))
    for row, ids in enumerate(batch["document_ids"]):
        for number in ids.unique():
            here = ids == number
            alone = run.model.head.logits(run.model({"input_ids": batch["input_ids"][row, here][None]}))
            torch.testing.assert_close(logits[row, here], alone[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("backend", "documents"), WAYS)
def test_another_document_changes_nothing_at_all(packed: Callable[..., Run], backend: str, documents: str) -> None:
    run = packed(Isolate(), backend, documents)
    batch = batches(run, 1000)[0]
    row = int((batch["document_ids"].max(1).values >= 2).nonzero()[0])
    batch = {name: tensor[row : row + 1] for name, tensor in batch.items()}
    other = batch["document_ids"] == 1
    changed = batch | {"input_ids": torch.where(other, (batch["input_ids"] + 1) % 31, batch["input_ids"])}
    outputs = [run.model(b) for b in (batch, changed)]
    assert torch.equal(outputs[0][~other], outputs[1][~other])
    assert (outputs[0][other] != outputs[1][other]).any()
    x = run.model.embed(batch)[0].detach().requires_grad_()
    carry = (x,)
    for layer in run.model.layers.values():
        carry = layer(carry, batch)
    (grad,) = torch.autograd.grad(run.model.finish(carry, batch)[other].square().sum(), x)
    assert grad[other].abs().sum() > 0
    assert not grad[~other].any()


def test_layers_that_are_run_one_by_one_give_the_same_without_what_is_prepared(packed: Callable[..., Run]) -> None:
    run = packed(BestFit(), "flash", "mask")
    (batch,) = batches(run, 1000)
    carry = run.model.embed(batch)
    for layer in run.model.layers.values():
        carry = layer(carry, batch)
    assert torch.equal(run.model.finish(carry, batch), run.model(batch))


# --- whole runs ------------------------------------------------------------------------------------------------------


def job(folder: Path, packing: Any, **changes: Any) -> Any:
    return tiny_job(str(folder), None, **(settings_of(packing) | changes))


def settings_of(packing: Any) -> dict[str, Any]:
    data = {"sources": (RandomDocuments(longest=60, count=40),), "packing": packing}
    settings = {"global_batch_size": 8, "seq_len": SEQ_LEN, "precision": "fp64", "eval": {"interval": 2}, "data": data}
    return {**settings, "model": model(), "gc_interval": 0}


def curve(folder: Path) -> list[dict[str, float]]:
    keys = ("loss", "grad_norm", "eval/loss", "eval/tokens")
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [{key: record[key] for key in keys if key in record} for record in records]


def train(folder: Path, packing: Any, **changes: Any) -> None:
    Trainer(job(folder, packing, **changes), echo=lambda text: None).run()


def observation(packing: Any) -> Callable[[Path, Mapping[str, Any]], list[dict[str, float]]]:
    def observe(folder: Path, changes: Mapping[str, Any]) -> list[dict[str, float]]:
        # Ranks are started by any test, without the fixtures of this module.
        with mock.patch.object(segment_attention, "TOGETHER", 12):
            train(folder, packing, **changes)
        return curve(folder)

    return observe


def same_curve(ranks: Sequence[list[dict[str, float]]], expected: list[dict[str, float]]) -> None:
    assert len(expected) >= 6
    # Rank 0 writes the lines, and another rank may have read them before the last one.
    for one, other in zip(ranks[0], expected, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


test_layouts = layout_law(
    Case("isolate", observe=observation(Isolate()), compare=same_curve, layouts=["replicate2"]),
    Case("best fit", observe=observation(BestFit()), compare=same_curve, layouts=["replicate2"]),
)


def test_compiled_blocks_keep_the_curve(tmp_path: Path) -> None:
    torch._dynamo.reset()
    settings = {"model": attrs.evolve(model(), layers=1), "steps": 2}
    train(tmp_path / "eager", BestFit(), **settings)
    train(tmp_path / "compiled", BestFit(), **settings, parallel={"compile": Compile(backend="aot_eager")})
    for one, other in zip(curve(tmp_path / "compiled"), curve(tmp_path / "eager"), strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_packings_have_curves_of_their_own(tmp_path: Path) -> None:
    from forge_core.data.packing import Concatenate

    found = []
    for number, packing in enumerate([*PACKINGS, Concatenate()]):
        train(tmp_path / str(number), packing)
        found.append(curve(tmp_path / str(number))[0]["loss"])
    assert len(set(found)) == 3


test_resumption = resumption_law(
    Interrupted("best fit", changes=lambda: {**settings_of(BestFit()), "steps": 4}, interruptions=[[Stop(step=2)]])
)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_read_packed_sequences_too(tmp_path: Path, workers: int) -> None:
    data = {"sources": (RandomDocuments(longest=60),), "packing": BestFit(), "workers": workers}
    Trainer(job(tmp_path, BestFit(), data=data, steps=2), echo=lambda text: None).run()
    assert len(curve(tmp_path)) >= 2


def test_the_plan_tells_how_full_the_sequences_are(tmp_path: Path) -> None:
    told: list[str] = []
    Trainer(job(tmp_path, BestFit(), steps=1), echo=told.append).run()
    (row,) = [line for line in "\n".join(told).splitlines() if line.startswith("packing")]
    assert not lacks(row, "40 documents", "held out: 5 documents")


# --- what does not go together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS, ids=["isolate", "best_fit"])
def test_finished_sequences_beside_packed_ones_must_say_which_document_is_where(tmp_path: Path, packing: Any) -> None:
    data = {"sources": (RandomDocuments(), Numbers()), "packing": packing}
    with pytest.raises(DataError, match="entry 'document_ids' is "):
        Trainer(job(tmp_path, packing, data=data), echo=lambda text: None).run()


class Endless:
    """One lane of the same document."""

    lanes, held_out = 1, None

    def read(self, lane: int, position: Any) -> Iterator[StreamedDocument]:
        while True:
            yield StreamedDocument(np.array([1, 2, 3, 31]), None, {})


@frozen(kw_only=True)
class EndlessDocuments(DatasetComponent):
    def build(self, context: Any) -> Any:
        return packed_stream(Endless(), context)


def test_streams_can_be_isolated_but_not_packed_by_best_fit(
    make_job: Callable[..., Any], build: Callable[..., Run]
) -> None:
    data = {"sources": (EndlessDocuments(),)}
    (stream,) = build(make_job(data=data | {"packing": Isolate()})).datasets
    sample, _ = next(stream.read(0, None))
    assert sample["positions"].tolist() == [0, 1, 2, 3] * 2
    with refuses("data.sources.0", "[data.packing]", "stream"):
        build(make_job(data=data | {"packing": BestFit()}))


def test_finished_sequences_are_refused_by_a_packing_that_needs_documents(
    make_job: Callable[..., Any], build: Callable[..., Run]
) -> None:
    class DocumentsOnly(BestFit):
        accepts_sequences = False

    with pytest.raises(JobError) as caught:
        build(make_job(data={"sources": (Numbers(),), "packing": DocumentsOnly()}))
    assert [problem.path for problem in caught.value.problems] == ["data.sources.0"]


def test_documents_that_are_all_too_short_are_refused(make_job: Callable[..., Any], build: Callable[..., Run]) -> None:
    class Short(RandomDocuments):
        def build(self, context: Any) -> ListedDocuments:
            return ListedDocuments([[]])

    with refuses("data.sources.0", "train.seq_len = 8"):
        build(make_job(data={"sources": (Short(),), "packing": BestFit()}))
