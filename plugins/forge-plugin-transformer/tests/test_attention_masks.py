"""Masks of attention: kernels, documents, caches and layouts, against definitions pair by pair in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import cross_entropy

from forge_core.config.load import load_job
from forge_core.contracts.components import DatasetComponent
from forge_core.contracts.errors import ForgeError, JobError
from forge_core.losses import CrossEntropy
from forge_kit.nn.attention_pattern import attention_pattern
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_text.packing import Isolate
from forge_plugin_transformer import (
    AttentionBackendComponent,
    AttentionMaskComponent,
    AttentionPattern,
    BidirectionalMask,
    ChunkedMask,
    GlobalLocalMask,
    GroupedQueryAttention,
    Transformer,
)
from forge_plugin_transformer.modules.documents import places_in_documents
from forge_plugin_transformer.modules.largest_scores import largest_scores
from forge_plugin_transformer.modules.masks import check_mask, pair_mask
from forge_plugin_transformer.modules.softmax_attention import softmax_attention
from forge_plugin_transformer.modules.spans import spans_problem
from forge_plugin_transformer.scoring import Scoring
from forge_testing.documents import RandomDocuments
from forge_testing.refusals import at, check_problems
from forge_testing.runs import advance, tiny_run
from forge_testing.suites import ModelSuite
from forge_testing.suites.parity import ParitySuite
from forge_testing.tiny import BESIDE_MODEL, TinyAdamW

MakeModel = Callable[..., Any]
HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2}
CHUNKS = ChunkedMask(chunk_size=5)
NEAR_AND_FIRST = GlobalLocalMask(window=3, global_positions=2)
BOTH_WAYS = BidirectionalMask()
MASKS = [CHUNKS, NEAR_AND_FIRST, BOTH_WAYS]
DOCUMENTS = torch.tensor([[7] * 5 + [3] * 11, [0] * 12 + [1] * 4])
ONE = torch.zeros(2, 16, dtype=torch.int64)


def sees(mask: AttentionMaskComponent, query: int, key: int) -> bool:
    """The definitions in the docstrings."""
    if mask == CHUNKS:
        return key <= query and query // 5 == key // 5
    if mask == NEAR_AND_FIRST:
        return key <= query and (query - key < 3 or key < 2)
    return True


def pairs_of(mask: AttentionMaskComponent, document_ids: Tensor) -> Tensor:
    """(B, S) -> (B, 1, S, S), document by document."""
    pairs = torch.zeros(*document_ids.shape, document_ids.shape[1], dtype=torch.bool)
    for row, ids in enumerate(document_ids.tolist()):
        starts = [0, *(place for place in range(1, len(ids)) if ids[place] != ids[place - 1]), len(ids)]
        for start, stop in pairwise(starts):
            own = [[sees(mask, query, key) for key in range(stop - start)] for query in range(stop - start)]
            pairs[row, start:stop, start:stop] = torch.tensor(own)
    return pairs[:, None]


@pytest.mark.parametrize("mask", MASKS)
def test_pairs_are_those_of_the_definition_in_each_document(mask: AttentionMaskComponent) -> None:
    assert torch.equal(pair_mask(mask, DOCUMENTS), pairs_of(mask, DOCUMENTS))
    assert mask.pairs(16) >= pair_mask(mask, ONE[:1]).sum() - 8 if mask.causal else mask.pairs(16) == 256


WAYS = [
    *({"backend": kernel, "documents": "mask"} for kernel in ("gemm", "math", "flash")),
    *({"backend": kernel, "documents": "segments"} for kernel in ("gemm", "flash")),
    {},
    {"window": 2},
    {"sinks": True, "backend": "gemm", "scale": 0.4},
    {"sinks": True},
    {"soft_cap": 0.5},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@torch.no_grad()
def test_every_kernel_computes_the_softmax_of_these_pairs(make_model: MakeModel, mask: Any, options: Any) -> None:
    blocks = mask == CHUNKS
    if (options.get("documents") == "segments" and not blocks) or (
        not mask.causal and (options.get("backend") == "gemm" or "window" in options)
    ):
        return  # refused, as another test shows
    attention = GroupedQueryAttention(**HEADS, mask=mask, **options)
    core = make_model(dtype=torch.float64, attention=attention, layers=1).layers["0"].attention.core
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 16, n, 8, dtype=torch.float64, generator=generator) for n in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64, generator=generator) if "sinks" in options else None
    for documents in (None, DOCUMENTS):
        pairs = pairs_of(mask, ONE if documents is None else documents)
        if "window" in options:
            pairs = pairs.triu(-1)
        expected = softmax_attention(q, k, v, pairs, core.scoring, sinks)
        batch = {"input_ids": ONE} | ({} if documents is None else {"document_ids": documents})
        for given in (batch, core.prepare(batch)):
            torch.testing.assert_close(core(q, k, v, given, sinks), expected, atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_what_hides_nothing_changes_no_bit(make_model: MakeModel, ids: Tensor) -> None:
    plain = make_model()({"input_ids": ids, "document_ids": DOCUMENTS})
    for mask in (ChunkedMask(chunk_size=16), GlobalLocalMask(window=12, global_positions=4)):
        model = make_model(attention=GroupedQueryAttention(**HEADS, mask=mask))
        assert torch.equal(model({"input_ids": ids, "document_ids": DOCUMENTS}), plain)


def test_flops_count_the_pairs_that_are_seen(make_model: MakeModel) -> None:
    def scores(**options: Any) -> float:
        model = make_model(attention=GroupedQueryAttention(**HEADS, **options), layers=1)
        return model.flops(16) - make_model(layers=1).flops(0 + 16) + 6 * 32 * 16

    assert scores() == 6 * 32 * 16  # half of 16 keys, and a half each for scores and mixing
    assert scores(mask=ChunkedMask(chunk_size=4)) == 6 * 32 * 4
    assert scores(mask=BOTH_WAYS) == 6 * 32 * 32


@pytest.mark.parametrize("mask", MASKS[:2])
def test_a_cache_changes_nothing_however_rows_are_padded_and_joined(
    make_model: MakeModel, ids: Tensor, mask: AttentionMaskComponent
) -> None:
    attention = AttentionPattern(
        layers=("masked", "full"),
        kinds={"masked": GroupedQueryAttention(**HEADS, mask=mask), "full": GroupedQueryAttention(**HEADS)},
    )
    model = make_model(dtype=torch.float64, attention=attention).eval().requires_grad_(False)
    whole = model({"input_ids": ids})
    first, second = model.new_cache(1, 16), model.new_cache(1, 16)
    model.decode({"input_ids": ids[:1, :6], "positions": torch.arange(6)[None]}, first)
    padded = torch.tensor([[-1, -1, *range(7)]])
    model.decode({"input_ids": torch.cat([ids[1:, :2], ids[1:, :7]], 1), "positions": padded}, second)
    rows = [(first, torch.tensor([0])), (second, torch.tensor([0]))]
    cache, positions = first.joined(rows, 9, 24), torch.tensor([[6], [7]])
    for _ in range(9):
        step = {"input_ids": ids.gather(1, positions), "positions": positions}
        index = positions[..., None].expand(-1, -1, whole.shape[-1])
        torch.testing.assert_close(model.decode(step, cache), whole.gather(1, index), atol=1e-12, rtol=1e-12)
        positions = positions + 1


def test_a_cache_of_chunks_has_the_size_of_a_chunk(make_model: MakeModel) -> None:
    attention = GroupedQueryAttention(**HEADS, mask=ChunkedMask(chunk_size=40))
    model = make_model(dtype=torch.float64, attention=attention).eval().requires_grad_(False)
    ids = torch.randint(61, (1, 300), generator=torch.Generator().manual_seed(1))
    cache, outputs = model.new_cache(1, 300), []
    for start in range(0, 300, 30):
        part = slice(start, start + 30)
        outputs.append(model.decode({"input_ids": ids[:, part], "positions": torch.arange(300)[None, part]}, cache))
    torch.testing.assert_close(torch.cat(outputs, 1), model({"input_ids": ids}), atol=1e-12, rtol=1e-12)
    assert cache["0"].nbytes == (40 - 1 + 128) * (2 * 2 * 8 * 8 + 16)


def test_a_bidirectional_model_sees_what_comes_later_and_does_not_generate(make_model: MakeModel) -> None:
    model = make_model(attention=GroupedQueryAttention(**HEADS, mask=BOTH_WAYS)).eval()
    with pytest.raises(ForgeError, match=r"BidirectionalMask.*does not generate token by token"):
        generate(model, [[1, 2, 3]], 4, 60)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        before, after = (model({"input_ids": ids.where(ids < 7, last)}) for last in (7, 60))
    assert not torch.allclose(before[0, 0], after[0, 0])


def test_spans_are_refused_with_a_mask(make_model: MakeModel) -> None:
    assert spans_problem(make_model()) is None
    assert "GroupedAttention" in str(spans_problem(make_model(attention=GroupedQueryAttention(**HEADS, mask=CHUNKS))))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_the_pattern_of_a_tap_has_the_mask(make_model: MakeModel, mask: AttentionMaskComponent, packed: bool) -> None:
    model = make_model(attention=GroupedQueryAttention(**HEADS, mask=mask))
    mixing = model.tap_points()["layers.0.pattern"].mixing
    q, k = (torch.randn(2, 16, n, 8, dtype=torch.float64) for n in (4, 2))
    places = torch.tensor([[0, 7, 15], [3, 4, 12]])
    batch = {"document_ids": DOCUMENTS} if packed else {}
    weights = attention_pattern(q.take_along_dim(places[..., None, None], 1), k, places, batch, mixing)
    seen = pairs_of(mask, DOCUMENTS if packed else ONE)[:, 0].take_along_dim(places[..., None], 1)
    assert torch.equal(weights > 0, seen[:, :, None].expand_as(weights))


@pytest.mark.parametrize("mask", MASKS)
def test_the_largest_scores_are_those_of_pairs_that_are_seen(mask: AttentionMaskComponent) -> None:
    q, k = (torch.randn(2, 16, n, 8, dtype=torch.float64) for n in (4, 2))
    scores = torch.einsum("bshe,bthe->bhst", q, k.repeat_interleave(2, 2)) * 8**-0.5
    for batch, documents in (({}, ONE), ({"document_ids": DOCUMENTS}, DOCUMENTS)):
        expected = scores.masked_fill(~pairs_of(mask, documents), -torch.inf).amax((0, 2, 3))
        torch.testing.assert_close(largest_scores(q, k, batch, Scoring(mask=mask)), expected)


# --- layouts ---------------------------------------------------------------------------------------------------------


class TestChunks(ModelSuite):
    """With norms without gain behind the encoding, and queries that grow, as layers of Llama 4."""

    component = Transformer(
        vocab_size=32, dim=16, layers=2,
        attention=GroupedQueryAttention(
            **HEADS, mask=ChunkedMask(chunk_size=3), qk_norm=True, qk_norm_rotated=True, qk_norm_gain=False,
            query_growth=0.5, query_growth_length=4, query_growth_offset=1,
        ),
    )  # fmt: skip
    layouts = ("cp2",)

    def test_its_tap_points_are_used(self, tmp_path):
        pytest.skip("the first position of a chunk sees itself alone, so that its query changes nothing")


class TestGlobalAndLocal(ModelSuite):
    component = Transformer(
        vocab_size=32, dim=16, layers=2,
        attention=GroupedQueryAttention(**HEADS, mask=GlobalLocalMask(window=2, global_positions=1), sinks=True),
    )  # fmt: skip
    layouts = ("cp2", "traced")


@frozen(kw_only=True)
class SeenTokens(CrossEntropy):
    """A loss of an encoder."""

    predicts_next_token: ClassVar[bool] = False


class TestPackedMasks(ParitySuite):
    """Two masks with documents that share sequences."""

    layouts = ("pp2", "cp2")

    def parity_changes(self, folder):
        kinds = {str(number): GroupedQueryAttention(**HEADS, mask=mask) for number, mask in enumerate(MASKS[:2])}
        attention = AttentionPattern(layers=("0", "1"), kinds=kinds)
        model = Transformer(vocab_size=32, dim=16, layers=2, attention=attention)
        return {"model": model, "data": {"sources": (RandomDocuments(held_out=5),), "packing": Isolate()}}


class TestBothWays(ParitySuite):
    layouts = ("tp2", "pp2", "traced")

    def parity_changes(self, folder):
        attention = GroupedQueryAttention(**HEADS, mask=BOTH_WAYS)
        model = Transformer(vocab_size=32, dim=16, layers=2, attention=attention)
        data = {"sources": (RandomDocuments(held_out=5),), "packing": Isolate()}
        return {"model": model, "loss": SeenTokens(), "data": data}


# --- a stranger's ----------------------------------------------------------------------------------------------------

DILATED = '''
from attrs import field, frozen
from attrs.validators import gt

from forge_plugin_transformer import AttentionMaskComponent


@frozen(kw_only=True)
class Dilated(AttentionMaskComponent):
    """Every n-th position before."""

    step: int = field(default=2, validator=gt(0))
    count: int = field(default=3, validator=gt(0))

    def sees(self, query, key):
        return ((query - key) % self.step == 0) & (query - key < self.reach())

    def reach(self):
        return self.step * (self.count - 1) + 1
'''


def job_of(folder: Path, attention: str, more: str = "") -> Any:
    (folder / "dilated.py").write_text(DILATED)
    (folder / "encoder.py").write_text(
        "from typing import ClassVar\nfrom attrs import frozen\nfrom forge_core.losses import CrossEntropy\n"
        "@frozen(kw_only=True)\nclass Encoder(CrossEntropy):\n    predicts_next_token: ClassVar[bool] = False\n"
    )
    path = folder / "job.toml"
    text = f'[model]\ntype = "transformer"\nvocab_size = 32\n[model.attention]\n{attention}\n{more}\n{BESIDE_MODEL}'
    path.write_text(text.replace("./", f"{folder}/"))
    return load_job(path)


@torch.no_grad()
def test_a_mask_of_one_file(tmp_path: Path, make_model: MakeModel, ids: Tensor) -> None:
    attention = job_of(tmp_path, 'mask = { type = "./dilated.py:Dilated", step = 4 }').model.attention
    assert attention.mask.reach() == 9
    model = make_model(dtype=torch.float64, attention=GroupedQueryAttention(**HEADS, mask=attention.mask)).eval()
    pairs = torch.tensor([[q >= k and (q - k) % 4 == 0 and q - k < 9 for k in range(16)] for q in range(16)])
    q, k, v = (torch.randn(2, 16, n, 8, dtype=torch.float64) for n in (4, 2, 2))
    core = model.layers["0"].attention.core
    expected = softmax_attention(q, k, v, pairs[None, None], core.scoring)
    torch.testing.assert_close(core(q, k, v, {}), expected, atol=1e-12, rtol=1e-12)
    prompts = [ids[0, :5].tolist(), ids[1, :9].tolist()]
    cached, whole = (generate(model, prompts, 12, 60, Sampling(temperature=0), use_cache=use) for use in (True, False))
    assert cached == whole


class FlexKernel(nn.Module):
    """FlexAttention, to which a component's `sees` is a `mask_mod` of positions in documents."""

    def __init__(self, scoring: Any) -> None:
        super().__init__()
        self.mask = scoring.mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Any, sinks: Tensor | None) -> Tensor:
        documents = batch.get("document_ids", torch.zeros(q.shape[:2], dtype=torch.int64))
        places = places_in_documents(documents)

        def seen(b: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
            near = self.mask.sees(places[b, i], places[b, j])
            return ((i >= j) | (not self.mask.causal)) & near & (documents[b, i] == documents[b, j])

        blocks = create_block_mask(seen, len(q), None, q.shape[1], q.shape[1], device="cpu")
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return flex_attention(*heads_first, block_mask=blocks, enable_gqa=True).transpose(1, 2)


@frozen(kw_only=True)
class Flex(AttentionBackendComponent):
    """FlexAttention of torch."""

    computes: ClassVar = ("mask", "bidirectional_mask")

    def build(self, context: Any, scoring: Any, head_dim: int) -> nn.Module:
        return FlexKernel(scoring)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", MASKS)
@torch.no_grad()
def test_a_kernel_of_a_plugin_gets_the_mask(make_model: MakeModel, ids: Tensor, mask: AttentionMaskComponent) -> None:
    options: dict[str, Any] = {**HEADS, "mask": mask}
    ours, flex = (
        make_model(dtype=torch.float64, attention=GroupedQueryAttention(**options, backend=backend)).eval()
        for backend in ("auto", Flex())
    )
    for batch in ({"input_ids": ids}, {"input_ids": ids, "document_ids": DOCUMENTS}):
        torch.testing.assert_close(flex(batch), ours(batch), atol=1e-12, rtol=1e-12)


@frozen
class PairSequences:
    """Random tokens, each twice in a row, of which the first one is masked: see `Dataset`."""

    seq_len: int
    held_out: Any = None
    bytes_per_token: float | None = None

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = np.random.default_rng(index).integers(0, 16, self.seq_len // 2).repeat(2)
        first = np.arange(self.seq_len) % 2 == 0
        # The labels of a source are the targets of its positions, whatever they are
        return {"input_ids": np.where(first, MASKED, tokens), "labels": np.where(first, tokens, -100)}


MASKED = 16


@frozen(kw_only=True)
class Pairs(DatasetComponent):
    """Texts of a masked language model."""

    def build(self, context: Any) -> PairSequences:
        return PairSequences(context.job.train.seq_len, PairSequences(context.job.train.seq_len))


def test_a_masked_language_model_learns_what_only_later_positions_show(tmp_path: Path) -> None:
    losses = {}
    for mask in (BOTH_WAYS, CHUNKS):
        attention = GroupedQueryAttention(**HEADS, mask=mask)
        run = tiny_run(
            tmp_path / type(mask).__name__, loss=SeenTokens(), optimizer=TinyAdamW(lr=1e-2), precision="fp32",
            model=Transformer(vocab_size=17, dim=32, layers=1, attention=attention),
            data={"sources": (Pairs(),)}, steps=60, global_batch_size=16, seq_len=16,
        )  # fmt: skip
        advance(run, 60)
        sample = {name: torch.from_numpy(array)[None] for name, array in PairSequences(16)[999].items()}
        with torch.no_grad():
            logits = run.model.head.logits(run.model({"input_ids": sample["input_ids"]}))
        losses[mask] = cross_entropy(logits.flatten(0, 1), sample["labels"].flatten()).item()
    assert losses[BOTH_WAYS] < 0.5
    assert losses[CHUNKS] > 2.0  # of ln 16 = 2.77, as nothing before tells a token


class _Wrong(AttentionMaskComponent):
    pass


@frozen(kw_only=True)
class OneTooFar(_Wrong):
    def sees(self, query, key):
        return query - key <= 4

    def reach(self):
        return 4


@frozen(kw_only=True)
class Numbers(_Wrong):
    def sees(self, query, key):
        return query - key


@frozen(kw_only=True)
class Unseen(_Wrong):
    def sees(self, query, key):
        return query - key < 3

    def hides(self, length):
        return False


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (OneTooFar(), r"OneTooFar.reach\(\) is 4, and in a document of 5 positions sees\(\) shows a key further back"),
        (Numbers(), r"Numbers.sees returns torch.int64 \(1, 1\) .* must be bool \(1, 1\)"),
        (Unseen(), r"Unseen.hides\(33\) is False, and sees\(\) hides a position"),
    ],
)
def test_a_mask_that_states_something_else_than_it_hides_is_refused(mask: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        check_mask(mask, "model.attention.mask")


def test_shipped_masks_state_what_they_hide() -> None:
    for mask in (*MASKS, ChunkedMask(), GlobalLocalMask(window=100, global_positions=1), ChunkedMask(chunk_size=1)):
        check_mask(mask, "model.attention.mask")


BOTH = 'mask.type = "bidirectional"'
ENCODER = '[loss]\ntype = "./encoder.py:Encoder"'


def test_a_loss_may_declare_that_it_predicts_no_next_token(tmp_path: Path) -> None:
    assert job_of(tmp_path, BOTH, ENCODER).model.attention.mask == BOTH_WAYS


@pytest.mark.parametrize(
    ("attention", "more", "expected"),
    [
        (BOTH, "", at("model.attention.mask", "BidirectionalMask", "CrossEntropy", "predicts_next_token = False")),
        (f"{BOTH}\nwindow = 4", ENCODER, at("model.attention.window", "BidirectionalMask", "leave it out")),
        (f'{BOTH}\nbackend = "gemm"', ENCODER, at("model.attention.backend", "gemm", "BidirectionalMask", "math")),
        (BOTH, f"[model.mtp]\n{ENCODER}", at("model.mtp", "BidirectionalMask", "leave the table out")),
        (
            'mask = { type = "global_local", window = 4 }\ndocuments = "segments"', "",
            at("model.attention.documents", "segments", "GlobalLocalMask", "auto, mask"),
        ),
        (
            'mask = { type = "global_local", window = 4 }\nbackend = "flash"\nsinks = true', "",
            at("model.attention.backend", "flash", "GlobalLocalMask and sinks", "gemm"),
        ),
        ("qk_norm_gain = false", "", at("model.attention.qk_norm_gain", "qk_norm = false", "leave it out")),
        ('qk_norm_gain = false\nqk_norm = "all"', "", at("model.attention.qk_norm_gain", "qk_norm = all", '"head"')),
        ('mask = { type = "chunked", chunk_size = 0 }', "", at("model.attention.mask.chunk_size", "0")),
        ('mask.type = "chunk"', "", at("model.attention.mask.type", "chunked")),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, attention: str, more: str, expected: Any) -> None:
    with pytest.raises(JobError) as caught:
        job_of(tmp_path, attention, more)
    check_problems(caught.value.problems, expected)
