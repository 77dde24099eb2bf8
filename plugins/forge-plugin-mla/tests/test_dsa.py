"""`dsa` against its equations, position by position, and its indexer in training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from forge_core.cli import main
from forge_core.data.loader import TrainLoader
from forge_core.engine.step import Stepper, metrics
from forge_kit.nn.position_probe import undeclared_mixer
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_mla import DeepSeekSparseAttention, MultiHeadLatentAttention
from forge_plugin_mla.modules import lightning_indexer
from forge_plugin_mla.modules.latent_cache import IndexedCache
from forge_plugin_mla.modules.lightning_indexer import best
from forge_plugin_mla.modules.sparse_attention import LOSS
from forge_plugin_parallel import ContextParallel, TensorParallel
from forge_plugin_transformer import Transformer, YarnRope
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, problems_of
from forge_testing.runs import tiny_run

MakeModel = Callable[..., Any]
HEADS, INDEX_HEADS, WIDTH, TOP_K, B, S = 4, 3, 10, 5, 2, 24
WIDTHS = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
ATTENTION = DeepSeekSparseAttention(
    heads=HEADS, q_lora_rank=14, index_n_heads=INDEX_HEADS, index_head_dim=WIDTH, index_topk=TOP_K, **WIDTHS,
    rope=YarnRope(factor=4.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=0.7),
)  # fmt: skip
WITHOUT_LATENT = attrs.evolve(ATTENTION, q_lora_rank=0, rope_interleave=True, index_rope_interleave=True)
WARM_UP = attrs.evolve(ATTENTION, dense_warmup=True)


# --- the equations ---------------------------------------------------------------------------------------------------


def turned(x: Tensor, rotary: Any, positions: Tensor, interleaved: bool) -> Tensor:
    """(B, S, heads, J), whose first dimensions are turned as complex numbers."""
    frequencies = rotary.frequencies
    pairs = len(frequencies)
    first = x[..., : 2 * pairs]
    real, imaginary = (first[..., 0::2], first[..., 1::2]) if interleaved else first.chunk(2, -1)
    angles = positions[..., None, None] * torch.tensor(frequencies, dtype=x.dtype)
    result = torch.complex(real, imaginary) * torch.polar(torch.full_like(angles, rotary.amplitude), angles)
    return torch.cat([result.real, result.imag, x[..., 2 * pairs :]], -1)


def by_hand(attention: Any, how: DeepSeekSparseAttention, x: Tensor, batch: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """The output, the loss summed over positions, and the chosen keys of each position."""
    length = x.shape[1]
    positions = batch.get("positions", torch.arange(length).expand(len(x), -1))
    ids = batch.get("document_ids", torch.zeros(len(x), length))
    documents = torch.nn.functional.pad((ids[:, 1:] != ids[:, :-1]).cumsum(1), (1, 0))
    turns = attention.rotary(length, batch.get("positions"))
    latent = attention.q_norm(attention.q_down(x)) if how.q_lora_rank else x
    q = attention._queries(latent, turns)
    k, v = attention._expanded(*attention._compressed(x, turns))
    part, fixed, latent = attention.indexer, x.detach(), latent.detach()
    options = attention.rotary, positions, how.index_rope_interleave
    iq = turned(part.q(latent).unflatten(-1, (INDEX_HEADS, WIDTH)), *options)
    ik = turned(part.k_norm(part.k(fixed)).unsqueeze(2), *options).squeeze(2)
    weights = part.weights(fixed)
    rows, loss, choice = [], x.new_zeros(()), {}
    for b in range(len(x)):
        for t in range(length):
            keys = [s for s in range(t + 1) if documents[b, s] == documents[b, t]]
            scores = torch.stack([(weights[b, t] * (iq[b, t] @ ik[b, s]).relu()).sum() for s in keys])
            scores = scores / (INDEX_HEADS * WIDTH) ** 0.5
            if not how.dense_warmup:
                order = sorted(range(len(keys)), key=lambda n, scores=scores: (-scores[n].item(), n))[: how.index_topk]
                keys, scores = [keys[n] for n in order], scores[order]
            p = torch.stack(
                [(q[b, t, h] @ k[b, keys, h].T / k.shape[-1] ** 0.5).softmax(-1) for h in range(q.shape[2])]
            )
            rows.append(torch.cat([p[h] @ v[b, keys, h] for h in range(q.shape[2])]))
            target = p.sum(0).detach()
            target = target / target.sum()
            loss = loss + (target * (target.log() - scores.log_softmax(-1))).sum()
            choice[b, t] = {*keys}
    return attention.o(torch.stack(rows).view(len(x), length, -1)), loss, choice


DOCUMENTS = torch.tensor([[0] * 9 + [1] * 15, [4] * 2 + [3] * 12 + [4] * 10])
PACKED = {
    "document_ids": DOCUMENTS,
    "positions": torch.tensor([[*range(9), *range(15)], [*range(2), *range(12), *range(10)]]),
}


@pytest.mark.parametrize(
    ("how", "batch"),
    [(ATTENTION, {}), (ATTENTION, PACKED), (WARM_UP, {}), (WARM_UP, PACKED), (WITHOUT_LATENT, PACKED)],
    ids=["sparse", "packed", "warm-up", "warm-up, packed", "without a latent"],
)
def test_output_loss_and_gradients_are_those_of_the_equations(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, how: DeepSeekSparseAttention, batch: dict[str, Tensor]
) -> None:
    """In float64, in blocks of 7 queries; from the loss the indexer learns, and nothing else does."""
    monkeypatch.setattr(lightning_indexer, "FEWEST_ROWS", 7)
    attention = make_model(attrs.evolve(how, index_loss_weight=0.5), layers=1, precision="fp64").layers["0"].attention
    attention.requires_grad_(True)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, S, 32, dtype=torch.float64, generator=generator).requires_grad_()
    direction = torch.randn(B, S, 32, dtype=torch.float64, generator=generator)
    parameters = {"x": x, **dict(attention.named_parameters())}
    expected, loss, choice = by_hand(attention, how, x, batch)
    wanted = torch.autograd.grad((expected * direction).sum() + 0.5 * loss / (B * S), list(parameters.values()))
    auxiliary = attention.core._auxiliary
    auxiliary.begin_step(torch.tensor(1), B, 1)
    found = attention(x, attention.prepare(batch))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    gradients = torch.autograd.grad((found * direction).sum(), list(parameters.values()))
    for name, one, other in zip(parameters, gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=name)
    assert auxiliary.totals()[LOSS].item() == pytest.approx(loss.item() / (B * S), rel=1e-10)
    assert loss > 0.01 * B * S
    sizes = {len(keys) for keys in choice.values()}
    longest = 15 if batch else S
    assert max(sizes) == (longest if how.dense_warmup else TOP_K)


def test_the_loss_of_the_job_and_that_of_the_indexer_do_not_meet(make_model: MakeModel) -> None:
    """Each parameter has a gradient of one of them."""
    attention = make_model(ATTENTION, layers=1, precision="fp64").layers["0"].attention.requires_grad_(True)
    x = torch.randn(B, S, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    reached = {}
    for trains in (False, True):
        attention.zero_grad()
        x.grad = None
        if trains:
            attention.core._auxiliary.begin_step(torch.tensor(1), B, 1)
        (attention(x, {}).sum() * (not trains)).backward()  # with a factor of 0, only the indexer's loss is left
        learned = {name for name, p in attention.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        reached[trains] = learned | ({"x"} if x.grad is not None and x.grad.abs().max() > 0 else set())
    names = {name for name, _ in attention.named_parameters()}
    assert reached[True] == {name for name in names if name.startswith("indexer.")}
    assert reached[False] == names - reached[True] | {"x"}


def test_of_equal_scores_the_earlier_positions_are_taken() -> None:
    scores = torch.tensor([[[0.0, 2.0, 0.0, 0.0, 3.0, 9.0]]])
    seen = torch.tensor([[[True, True, True, True, True, False]]])
    assert best(scores, seen, 3).tolist() == [[[True, True, False, False, True, False]]]
    assert best(scores, seen, 4).tolist() == [[[True, True, True, False, True, False]]]
    assert best(-scores, seen, 1).tolist() == [[[True, False, False, False, False, False]]]
    assert best(scores, seen & (torch.arange(6) < 2), 3).tolist() == [[[True, True, False, False, False, False]]]


# --- generation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [[24], [1] * 24, [9, 1, 1, 1, 12]], ids=["at once", "one by one", "mixed"])
def test_a_cache_changes_nothing(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, ids: Tensor, chunks: list[int]
) -> None:
    """In blocks of 7 queries with the cache, and in one without."""
    model = make_model(ATTENTION, precision="fp64")
    cache, positions = model.new_cache(2, 30), torch.arange(24).expand(2, -1)
    parts = zip(ids.split(chunks, 1), positions.split(chunks, 1), strict=True)
    expected = model({"input_ids": ids})
    monkeypatch.setattr(lightning_indexer, "FEWEST_ROWS", 7)
    found = torch.cat([model.decode({"input_ids": i, "positions": p}, cache) for i, p in parts], 1)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    dense = make_model(attrs.evolve(ATTENTION, index_topk=S), precision="fp64")({"input_ids": ids})
    assert (dense - expected).abs().max() > 1e-3
    layer = cache["0"]
    assert isinstance(layer, IndexedCache)
    assert layer.nbytes == 2 * 30 * ((12 + 4 + WIDTH) * 8 + 8)


def test_a_token_attends_to_no_more_latents_than_are_chosen(
    make_model: MakeModel, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, attended = make_model(ATTENTION, layers=1), []
    attention = model.layers["0"].attention
    plain = attention._attend_latents
    monkeypatch.setattr(
        attention, "_attend_latents", lambda q, c, *a: (attended.append(c.shape[1]), plain(q, c, *a))[1]
    )
    cache = model.new_cache(2, 30)
    for piece in ids[:, :7].split([3, 1, 1, 1, 1], 1):
        model.decode({"input_ids": piece}, cache)
    assert attended == [3, 4, 5, 5, 5]


def test_rows_of_other_lengths_are_generated_as_without_a_cache(make_model: MakeModel, ids: Tensor) -> None:
    model = make_model(ATTENTION, precision="fp64")
    prompts = [ids[0, :9].tolist(), ids[1, :3].tolist()]
    said = [generate(model, prompts, 12, 0, Sampling(temperature=0), use_cache=cache) for cache in (True, False)]
    assert said[0] == said[1]
    assert min(map(len, said[0])) > 5


# --- training --------------------------------------------------------------------------------------------------------


def test_ranks_that_share_heads_or_sequences_log_the_same_loss(tmp_path: Path) -> None:
    model = Transformer(dim=16, layers=2, vocab_size=32, init_std=0.3, attention=ATTENTION)
    sizes = {"seq_len": 16, "global_batch_size": 4, "precision": "fp64", "model": model}

    def logged(stages: Mapping[str, Any]) -> float:
        run = tiny_run(tmp_path, parallel=stages, **sizes)
        stepper, loader = Stepper(run), TrainLoader(run.job, run.datasets, run.context)
        _, sums = stepper.gradients(loader.next_step(), 0)
        loader.close()
        return metrics(sums)[LOSS].item()

    alone = logged({})
    assert alone > 0.01
    for stages in ({"tp": TensorParallel(degree=2)}, {"cp": ContextParallel(degree=2, method="ulysses")}):
        assert run_on_ranks(2, lambda rank, stages=stages: logged(stages)) == [pytest.approx(alone, rel=1e-10)] * 2


JOB = """
[job]
name = "{name}"
output = "{folder}/runs"
[train]
steps = {steps}
global_batch_size = 4
seq_len = 48
[model]
type = "transformer"
dim = 32
layers = 2
[model.attention]
heads = 4
q_lora_rank = 24
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 4
v_head_dim = 8
{attention}
[data.tokenizer]
type = "bytes"
[data.packing]
type = "isolate"
[[data.sources]]
type = "text"
path = "{folder}/*.txt"
[optimizer]
type = "adamw"
lr = 1e-2
{further}
"""
INDEXED = """type = "dsa"
index_n_heads = 4
index_head_dim = 8
index_topk = 8
"""


def test_a_trained_model_gets_an_indexer_in_two_stages_and_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the paper does it: a dense model, the warm-up with all else frozen, and training with chosen keys."""
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("the cat sat on the mat. " * (1 + number % 4))

    def lines(name: str, steps: int, attention: str, further: str = "") -> list[dict[str, Any]]:
        file = tmp_path / f"{name}.toml"
        file.write_text(JOB.format(name=name, folder=tmp_path, steps=steps, attention=attention, further=further))
        assert main([str(file)]) == 0
        read = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, read) if "loss" in record]

    dense = lines("dense", 25, 'type = "mla"')
    frozen = '[plugins.freeze]\n[[plugins.freeze.stages]]\ntrain = ["*.indexer.*"]\n'
    load = '[checkpoint.load]\npath = "{}/runs/{}"\n{}\n'
    start = load.format(tmp_path, "dense", 'exclude = ["*.indexer.*"]')
    warm = lines("warm", 25, INDEXED + "dense_warmup = true\n", frozen + start)
    assert warm[-1][LOSS] < 0.7 * warm[0][LOSS]
    # Nothing but the indexer has changed, and attention is still dense
    assert warm[-1]["loss"] < 1.3 * dense[-1]["loss"]
    accepted = 'accept_changes = ["model.attention.dense_warmup"]'
    sparse = lines("sparse", 10, INDEXED, load.format(tmp_path, "warm", accepted))
    assert sparse[0]["loss"] < 1.3 * dense[-1]["loss"]
    assert sparse[-1]["loss"] < sparse[0]["loss"]
    capsys.readouterr()
    prompts = ["--prompt", "the cat sat on the", "--max-tokens", "8", "--temperature", "0"]
    assert main(["generate", str(tmp_path / "runs/sparse"), *prompts]) == 0
    cached = capsys.readouterr().out
    assert main(["generate", str(tmp_path / "runs/sparse"), *prompts, "--no-cache"]) == 0
    assert capsys.readouterr().out == cached


def test_nothing_mixes_positions_but_the_declared_core(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(ATTENTION)
    assert undeclared_mixer(model) is None
    monkeypatch.setattr(model, "sequence_mixers", dict)
    assert undeclared_mixer(model) == "layers.0.attention.core"


# --- settings --------------------------------------------------------------------------------------------------------


def test_a_head_of_the_indexer_has_room_for_the_rotated_part(make_job: Callable[..., Any]) -> None:
    attention = DeepSeekSparseAttention(index_head_dim=8, qk_rope_head_dim=16)
    job = make_job(model=Transformer(vocab_size=32, attention=attention))
    check_problems(problems_of(job, 1), at("model.attention.index_head_dim", 8, "qk_rope_head_dim", 16))


def test_ranks_of_cp_share_heads_by_every_method(make_job: Callable[..., Any]) -> None:
    model = Transformer(vocab_size=32, attention=DeepSeekSparseAttention(heads=3))
    job = make_job(model=model, parallel={"cp": ContextParallel(degree=2)})
    check_problems(problems_of(job, 2), at("parallel.cp.degree", "3 key/value heads", "2 ranks"))


def test_flops_count_chosen_keys_of_the_attention_and_all_of_the_indexer(make_model: MakeModel) -> None:
    keys = {"heads": 2, "q_lora_rank": 8, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 10}
    sparse, dense, warm = (
        make_model(attention, dim=16, layers=1).layers["0"].attention.flops(100)
        for attention in (
            DeepSeekSparseAttention(**keys),
            MultiHeadLatentAttention(heads=2, q_lora_rank=8),
            DeepSeekSparseAttention(dense_warmup=True, **keys),
        )
    )
    matrices = 8 * 4 * 16 + 16 * 16 + 16 * 4
    chosen, every = 10 * 100 - 10 * 10 / 2, 100 * 100 / 2
    whole = 6 * 2 * (48 + 32) * every / 100
    assert warm - dense == pytest.approx(6 * matrices + 6 * 4 * 16 * every / 100)
    index = 4 * 16 * (2 * every + 4 * chosen) / 100
    assert sparse - dense == pytest.approx(6 * matrices + index - whole * (1 - chosen / every))


def test_the_plan_tells_that_pairs_are_masked(make_model: MakeModel) -> None:
    model = make_model(DeepSeekSparseAttention(index_topk=10))
    assert "10 of 16 keys" in model.backend_choices(16)[0][2]
    assert "all are chosen" in model.backend_choices(10)[0][2]


def test_no_weight_of_the_indexer_is_quantised_or_split(make_model: MakeModel) -> None:
    model = make_model(DeepSeekSparseAttention(), layers=1)
    names = [f"layers.0.attention.indexer.{name}" for name in ("q", "k", "weights")]
    assert {*names} < {*model.float8_exempt()}
    plan = model.tensor_parallel_plan()
    assert {plan[name.replace(".0.", ".*.")] if name not in plan else plan[name] for name in names} == {"replicate"}
