"""Edits change what plain hooks change, under every layout; they are off in training unless asked for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from safetensors.torch import save_file
from torch.nn import functional as F

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.layout import Layout
from forge_core.data.reading import collate
from forge_core.engine.evaluation import evaluate
from forge_core.engine.trainer import Trainer
from forge_kit.nn.taps import TapPoint
from forge_plugin_compile import Compile
from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_moe import MoE, SoftmaxTopK
from forge_plugin_parallel import FSDP, TensorParallel
from forge_plugin_taps import Ablate, Add, Mean, Replace, Split, Taps, Where, Zero
from forge_plugin_taps.lens import read_points
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.laws import Case, layout_law
from forge_testing.refusals import at, check_problems, naming, problems_of
from forge_testing.runs import tiny_run

LENGTH, DIM = 16, 16
FFN = MoE(experts=4, hidden=16, first_dense=1, dense=SwiGLU(hidden=24), router=SoftmaxTopK(top_k=2))
MODEL = Transformer(
    vocab_size=32, dim=DIM, layers=2, init_std=0.3, attention=GroupedQueryAttention(heads=4, kv_heads=2), ffn=FFN
)
STEER = tuple(float(number) for number in torch.linspace(-2, 2, DIM))
STORED = {"layers.0.resid_post": (DIM,), "layers.0.z": (4, 4)}


def store(folder: Path) -> dict[str, torch.Tensor]:
    """A store of two sequences with three positions each, written by another library. Returns its tensors."""
    step, generator = folder / "step-7", torch.Generator().manual_seed(3)
    step.mkdir(parents=True, exist_ok=True)
    values = {name: torch.randn(6, *shape, generator=generator, dtype=torch.float64) for name, shape in STORED.items()}
    tokens = {"row": torch.tensor([0, 0, 0, 1, 1, 1]), "position": torch.tensor([2, 5, 7, 0, 6, 11])}
    for name, tensor in values.items():
        save_file({name: tensor}, step / f"{name}.safetensors")
    save_file(tokens, step / "tokens.safetensors")
    files = {f"{name}.safetensors": {} for name in (*values, "tokens")}
    (step / "taps.json").write_text(json.dumps({"step": 7, "files": files}))
    return values


def edits(folder: Path):
    return {
        "heads": Zero(point="layers.*.z", heads=(1, 3)),
        "neurons": Zero(point="layers.0.mlp_hidden", features=(0, 5, 20)),
        "experts": Zero(point="layers.1.router_weights", experts=(2,)),
        "steer": Add(point="layers.0.resid_post", values=STEER, factor=1.5, positions=(3, 9)),
        "mean": Mean(point="layers.0.z", store=str(folder), heads=(2,)),
        "patch": Replace(point="layers.0.resid_post", store=str(folder), row=1),
        "patch of one": Replace(point="layers.0.resid_post", store=str(folder), row=1, positions=(6, 9)),
    }


def by_hand(name: str, model, batch, stored):
    """The same changes of whole tensors, by plain hooks."""
    choices = read_points(model, batch, ["layers.1.router_choices"]).values["layers.1.router_choices"]

    def zero(x, *index):
        x = x.clone()
        x[index] = 0
        return x

    def steer(x):
        x = x.clone()
        x[:, [3, 9]] += 1.5 * torch.tensor(STEER, dtype=x.dtype)
        return x

    def mean(x):
        x = x.clone()
        x[:, :, 2] = stored["layers.0.z"].mean(0)[2]
        return x

    def patch(x):
        x = x.clone()
        x[:, [0, 6, 11]] = stored["layers.0.resid_post"][3:]
        return x

    def patch_of_one(x):
        x = x.clone()
        x[:, 6] = stored["layers.0.resid_post"][4]  # 9 is not in the store
        return x

    heads = (slice(None), slice(None), [1, 3])
    return {
        "heads": {f"layers.{n}.z": lambda x: zero(x, *heads) for n in range(2)},
        "neurons": {"layers.0.mlp_hidden": lambda x: zero(x, slice(None), slice(None), [0, 5, 20])},
        "experts": {"layers.1.router_weights": lambda x: x.masked_fill(choices == 2, 0)},
        "steer": {"layers.0.resid_post": steer},
        "mean": {"layers.0.z": mean},
        "patch": {"layers.0.resid_post": patch},
        "patch of one": {"layers.0.resid_post": patch_of_one},
    }[name]


def built(folder, parallel, keys=None):
    taps = Taps(points=("layers.0.resid_pre",), edits=edits(Path(folder) / "store"), **(keys or {}))
    settings = {"precision": "fp64", "seq_len": LENGTH, "global_batch_size": 4, "micro_batch_size": 1}
    return tiny_run(
        folder, model=MODEL, parallel={**parallel, "taps": taps}, evaluations={"ablate": Ablate()},
        data={"sources": (Numbers(held_out=6),)}, **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("edits")
    stored = store(folder / "store")
    return folder, stored, evaluate(built(folder, {}), 0)


def test_edits_change_the_loss_as_plain_hooks_do(one):
    folder, stored, metrics = one
    run = tiny_run(folder, model=MODEL, precision="fp64", seq_len=LENGTH, data={"sources": (Numbers(held_out=6),)})
    model, held_out = run.model.eval(), run.datasets[0].held_out
    batch = collate([held_out[number] for number in range(6)])

    def loss(changes):
        logits = model.head.logits(read_points(model, batch, [], changes).hidden)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()

    assert metrics["ablate/loss"] == pytest.approx(loss({}), abs=1e-12)
    for name in edits(folder):
        expected = loss(by_hand(name, model, batch, stored))
        assert metrics[f"ablate/{name}/loss"] == pytest.approx(expected, abs=1e-12)
        assert metrics[f"ablate/{name}/change"] == pytest.approx(expected - loss({}), abs=1e-12)
        assert abs(expected - loss({})) > 1e-5, name


def edited(folder, layout):
    if not dist.is_initialized() or dist.get_rank() == 0:
        store(folder / "store")
    if layout:
        dist.barrier()
    return evaluate(built(folder, layout.get("parallel", {})), 0)


def the_same(ranks, alone):
    assert ranks == [pytest.approx(alone, abs=1e-12)] * len(ranks)


test_layouts = layout_law(Case("edits", observe=edited, compare=the_same, layouts=("fsdp2_ep2", "tp2", "pp2", "cp2")))


def test_training_is_edited_only_if_asked(tmp_path):
    def losses(**taps):
        parallel = {"taps": Taps(points=("layers.0.resid_pre",), **taps)} if taps else {}
        job = tiny_job(str(tmp_path / str(len(list(tmp_path.iterdir())))), model=MODEL, parallel=parallel, steps=2)
        return Trainer(job).run().loss

    plain = losses()
    assert losses(edits={"heads": Zero(point="layers.*.z", heads=(1,))}) == plain
    assert losses(edits={"heads": Zero(point="layers.*.z", heads=(1,), in_training=True)}) != plain


@pytest.mark.parametrize(
    "edit",
    [
        Add(point="layers.0.resid_post", values=STEER, positions=(3, 9)),
        Zero(point="layers.*.z", heads=(1,), positions=(2, 4, 9)),
        Zero(point="layers.1.k", heads=(0,)),
    ],
)
def test_generation_with_a_cache_is_edited(tmp_path, edit):
    model, ids = built_with(tmp_path, {"edit": edit}), torch.arange(12)[None]
    whole, cache = model({"input_ids": ids}), model.new_cache(1, 12)
    assert (whole - built_with(tmp_path, {})({"input_ids": ids})).abs().max() > 1e-3
    pieces = [
        model.decode({"input_ids": ids[:, part], "positions": torch.arange(12)[None, part]}, cache)
        for part in (slice(0, 5), slice(5, 9), slice(9, 12))
    ]
    assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-12


def test_an_edit_that_a_cache_would_lose_is_refused(tmp_path):
    ids, where = torch.arange(12)[None], torch.arange(12)[None]
    latent = MultiHeadLatentAttention(heads=4, kv_lora_rank=6, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
    model = built_with(tmp_path, {"heads": Zero(point="layers.*.z", heads=(1,))}, evolve(MODEL, attention=latent))
    with pytest.raises(ForgeError, match=naming("layers.0.z", "attn_out")):
        model.decode({"input_ids": ids, "positions": where}, model.new_cache(1, 12))
    model = built_with(tmp_path, {"keys": Zero(point="layers.0.k", positions=(1,))})
    cache = model.new_cache(1, 24)
    model.decode({"input_ids": ids, "positions": where}, cache)
    with pytest.raises(ForgeError, match=naming("layers.0.k", "keys or values")):
        model.decode({"input_ids": ids, "positions": where + 12}, cache)


def built_with(folder, changes, model=MODEL):
    taps = Taps(points=("layers.0.resid_pre",), edits=changes)
    return tiny_run(folder, model=model, precision="fp64", parallel={"taps": taps}).model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (Zero(point="layers.*.zz"), at("parallel.taps.edits.x.point", "'layers.*.zz'")),
        (Zero(point="layers.0.resid_mid", heads=(1,)), at("parallel.taps.edits.x.heads", "layers.0.resid_mid")),
        (Zero(point="layers.1.z", experts=(1,)), at("parallel.taps.edits.x.experts", "layers.1.z")),
        (
            Zero(point="layers.1.router_weights", experts=(1, 4)),
            at("parallel.taps.edits.x.experts", "layers.1.router_weights", "0 to 3", "4"),
        ),
        (Zero(point="layers.0.z", positions=(3, 16)), at("parallel.taps.edits.x.positions", "0 to 15", "16")),
        (Add(point="layers.0.z", values=STEER, positions=(16,)), at("parallel.taps.edits.x.positions", "16")),
        (Zero(point="layers.1.router_choices"), at("parallel.taps.edits.x.point", "layers.1.router_choices")),
        (Add(point="layers.0.z"), at("parallel.taps.edits.x.values", "values")),
        (Mean(point="layers.0.z", store="nowhere"), at("parallel.taps.edits.x.store", "'nowhere'")),
        (Zero(point="layers.0.z", features=(1,)), at("parallel.taps.edits.x.features", "layers.0.z", "heads")),
        (Zero(point="embed", positions=(1,)), at("parallel.taps.edits.x.positions", "embed", "layers.0.resid_pre")),
        (Add(point="embed", file="none.safetensors"), at("parallel.taps.edits.x.file", "'none.safetensors'")),
        (Mean(point="*.z", store="store"), at("parallel.taps.edits.x.store", "'store'", "layers.1.z", "layers.0.z")),
        (Replace(point="layers.0.q", store="store"), at("parallel.taps.edits.x.store", "'store'", "layers.0.q")),
    ],
)
def test_edits_that_cannot_be_made_are_refused_when_the_job_is_checked(tmp_path, monkeypatch, edit, expected):
    monkeypatch.chdir(tmp_path)
    store(tmp_path / "store")
    job = tiny_job(str(tmp_path), model=MODEL, parallel={"taps": Taps(edits={"x": edit})}, seq_len=LENGTH)
    check_problems(problems_of(job), expected)


def test_parts_of_a_sum_can_be_set_to_zero_and_nothing_else(tmp_path):
    """Each rank of tensor parallel has a part of what the experts add; a vector would be added by each."""

    def found(edit, parallel, ranks):
        job = tiny_job(str(tmp_path), model=MODEL, parallel={**parallel, "taps": Taps(edits={"x": edit})})
        return problems_of(job, ranks)

    add, point = Add(point="layers.1.expert_out", values=STEER), at("parallel.taps.edits.x.point", "mlp_out")
    tp = {"tp": TensorParallel(degree=2)}
    check_problems(found(add, tp, 2), point)
    check_problems(found(Zero(point="layers.1.expert_out"), tp, 2))
    check_problems(found(add, {"fsdp": FSDP()}, 2))


def test_a_second_stage_is_refused(tmp_path):
    """A model has one recorder: of two stages, one would capture nothing."""
    job = tiny_job(str(tmp_path), model=MODEL, parallel={"taps": Taps(), "more": Taps()})
    check_problems(problems_of(job), at("parallel.taps", "one stage"), at("parallel.more", "one stage"))


def test_a_mean_is_that_of_the_steps_that_have_the_point(tmp_path):
    """As of an expert that no token of a step chose."""
    values = store(tmp_path)["layers.0.z"]
    (tmp_path / "step-8").mkdir()
    (tmp_path / "step-8/taps.json").write_text('{"step": 8, "files": {"tokens.safetensors": {}}}')
    edit = Mean(point="layers.0.z", store=str(tmp_path))
    points = {"layers.0.z": TapPoint("layers.0", "output", axes="heads")}
    check_problems(edit.point_problems(points, Layout()))
    x = torch.zeros(1, 2, 4, 4, dtype=torch.float64)
    assert torch.equal(edited(edit, x)[0, 1], values.mean(0))
    replace = Replace(point="layers.0.z", store=str(tmp_path))
    check_problems(replace.point_problems(points, Layout()), at("store", "layers.0.z"))


def edited(edit, x, split=None, point=""):
    """What an edit makes of activations x (B, s, …)."""
    context = SimpleNamespace(device=x.device)
    return edit.build(context, taps=None).apply(
        x, Where(point or edit.point, "full", 0, split, {}, 0, outputs=(), decoding=False)
    )


HALF = Split(offset=2, length=2, size=4)


@pytest.mark.parametrize(
    ("edit", "shape", "split", "facts"),
    [
        (Zero(point="embed", features=(3, 16)), (16,), None, ["embed", "16 features", "names 16"]),
        (Zero(point="layers.0.z", heads=(4,)), (4, 4), None, ["layers.0.z", "4 heads", "names 4"]),
        (Zero(point="layers.0.z", heads=(4,)), (2, 4), HALF, ["layers.0.z", "4 heads", "names 4"]),
        (Add(point="embed", values=(1.0,) * 15), (16,), None, ["embed", "(15,)", "(16,)"]),
        (Add(point="embed", values=(1.0,) * 2), (2,), HALF, ["embed", "(2,)", "(4,)"]),
        (Add(point="embed", file="two"), (16,), None, ["two", "2 tensors"]),
        (Add(point="embed", file="none"), (16,), None, ["none", "0 tensors"]),
        (Add(point="embed", file="text"), (16,), None, ["text", "safetensors"]),
        (Add(point="embed", file="cut"), (16,), None, ["cut", "safetensors"]),
        (Mean(point="layers.0.resid_post", store="store"), (8,), None, ["layers.0.resid_post", "(16,)", "(8,)"]),
        (Replace(point="layers.0.resid_post", store="store"), (8,), None, ["layers.0.resid_post", "(16,)", "(8,)"]),
        (Replace(point="layers.0.z", store="store", row=2), (4, 4), None, ["step-7", "sequence 2", "[0, 1]"]),
    ],
)
def test_edits_that_do_not_fit_the_activations_are_refused(tmp_path, monkeypatch, edit, shape, split, facts):
    monkeypatch.chdir(tmp_path)
    store(tmp_path / "store")
    save_file({"a": torch.zeros(16), "b": torch.zeros(16)}, "two")
    save_file({}, "none")
    Path("text").write_text("not a tensor")
    Path("cut").write_bytes(Path("two").read_bytes()[:-4])
    with pytest.raises(ForgeError, match=naming(*facts)):
        edited(edit, torch.zeros(1, 3, *shape, dtype=torch.float64), split)


@pytest.mark.parametrize("kind", [Mean, Replace])
def test_a_point_that_a_store_does_not_have_is_named(tmp_path, kind):
    store(tmp_path / "store")
    edit = kind(point="layers.*", store=str(tmp_path / "store"))
    with pytest.raises(ForgeError, match=naming("layers.1.z", *STORED)):
        edited(edit, torch.zeros(1, 3, 4, 4, dtype=torch.float64), point="layers.1.z")


def test_the_last_number_that_there_is_can_be_named():
    ones = torch.ones(1, 1, 4)
    assert edited(Zero(point="embed", features=(3,)), ones).tolist() == [[[1, 1, 1, 0]]]
    own = edited(Zero(point="embed", features=(1, 3)), torch.ones(1, 1, 2), HALF)
    assert own.tolist() == [[[1, 0]]]
    assert edited(Add(point="embed", values=(1, 2, 3, 4)), torch.ones(1, 1, 2), HALF).tolist() == [[[4, 5]]]


@pytest.mark.parametrize(
    ("evaluation", "edits", "expected"),
    [
        (Ablate(), {}, at("evaluations.ablate", "nothing to ablate")),
        (
            Ablate(edits=("one", "tow")),
            {"one": Zero(point="embed"), "two": Zero(point="embed")},
            at("evaluations.ablate.edits.1", "'tow'", "'two'"),
        ),
    ],
)
def test_an_ablation_without_its_edit_is_refused_when_the_job_is_checked(tmp_path, evaluation, edits, expected):
    parallel = {"taps": Taps(edits=edits)}
    job = tiny_job(
        str(tmp_path), model=MODEL, parallel=parallel, evaluations={"ablate": evaluation},
        data={"sources": (Numbers(held_out=6),)},
    )  # fmt: skip
    check_problems(problems_of(job), expected)


def test_edits_in_training_are_refused_in_compiled_blocks(tmp_path):
    edit = Zero(point="layers.*.z", in_training=True)
    job = tiny_job(str(tmp_path), model=MODEL, parallel={"taps": Taps(edits={"x": edit}), "compile": Compile()})
    check_problems(problems_of(job), at("parallel.taps.edits.x.in_training", "compiled"))
