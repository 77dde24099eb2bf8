"""Reconstructions in place of activations: held-out losses, and latents set by hand."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from sae_stranger import Stranger, job, run, sae

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.layout import Layout
from forge_kit.nn.taps import TapPoint
from forge_plugin_compile import Compile
from forge_plugin_sae import LossRecovered, SAEEdit, TopK
from forge_plugin_sae.model import SparseCoder, load
from forge_plugin_sae.reconstruction import Reconstruct, Remember
from forge_plugin_taps import Ablate, PointInfo, Split, Taps, TapsInfo, recorder_of
from forge_testing import Numbers
from forge_testing.refusals import at, check_problems, naming, problems_of
from forge_testing.runs import tiny_run

SINKS = {
    "sae": sae(),
    "transcoders": sae(points=("*.resid_pre", "*.mlp_out"), output="mlp_out", folder="transcoders"),
}
EVALUATIONS = {name: LossRecovered(sink=name, sequences=6) for name in SINKS}


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluated(folder):
    """Figures of the sparse coders at the last evaluation."""
    (last,) = [line for line in lines(folder) if "eval/loss" in line][-1:]
    return {name.removeprefix("eval/sae/"): value for name, value in last.items() if name.startswith("eval/sae/")}


def made(folder, **changes):
    return job(folder, sinks=SINKS, eval={"interval": 4}, evaluations=EVALUATIONS, **changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(made(tmp_path_factory.mktemp("alone")))


def test_the_last_loss_recovered_is_that_of_the_saved_file_in_the_model_run_by_hand(tmp_path, monkeypatch):
    """Beside the same model, whose layer is replaced by hand."""
    from forge_plugin_sae import loss_recovery as module

    seen = {}

    def spy(settings, context):
        (coder,) = module_recorder(context.model).sinks["sae"].coders(final=True).values()
        figures = original(settings, context)
        (batch,) = context.batches(context.held_out, 0)
        seen.update(figures=figures, expected=by_hand(context, batch, coder), coder=coder)
        return figures

    def by_hand(context, batch, coder):
        def loss(change):
            (x,) = context.model.embed(batch)
            for number, layer in context.model.layers.items():
                x = x + layer.pair(x)
                x = change(x) if number == "0" else x
            logits = context.model.head.logits(context.model.finish((x,), batch))
            return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))

        clean, mine, zero = loss(lambda x: x), loss(coder), loss(torch.zeros_like)
        return {"clean_loss": clean, "loss": mine, "loss_recovered": (zero - mine) / (zero - clean)}

    original, module_recorder = module.recovered, module.recorder_of
    monkeypatch.setattr(module, "recovered", spy)
    sinks = {"sae": sae(points=("layers.0.resid_post",))}
    data = {"sources": (Numbers(held_out=8),)}
    evaluations = {"sae": LossRecovered(sequences=0)}
    changes = {"data": data, "evaluations": evaluations, "micro_batch_size": 8}
    folder = run(job(tmp_path, sinks=sinks, **changes))
    saved = load(folder / "sae/layers.0.resid_post").state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in seen["coder"].folded().items())
    figures = {name.rpartition("/")[2]: value for name, value in seen["figures"].items()}
    assert seen["expected"] == pytest.approx({name: figures[name] for name in seen["expected"]}, rel=1e-9)
    assert 0 < figures["l0"] <= 3
    assert figures["explained_variance"] > 0.3


def test_every_autoencoder_and_transcoder_is_evaluated(alone):
    figures = evaluated(alone)
    assert {name.rpartition("/")[0] for name in figures if "clean" not in name} == {
        *(f"sae/layers.{number}.resid_post" for number in range(2)),
        *(f"transcoders/layers.{number}.resid_pre" for number in range(2)),
    }
    assert all(value > 0 for name, value in figures.items() if name.endswith("/loss"))


def test_the_model_goes_on_as_if_nothing_had_been_replaced(alone, tmp_path):
    plain = run(job(tmp_path, sinks={}, eval={"interval": 4}))
    a, b = ([line["loss"] for line in lines(folder) if "loss" in line] for folder in (alone, plain))
    assert a == b


def test_a_compiled_model_has_the_same_losses(alone, tmp_path):
    """Edits come after the blocks were traced."""
    compiled = run(made(tmp_path, parallel={"compile": Compile(backend="aot_eager")}))
    assert evaluated(compiled) == pytest.approx(evaluated(alone), rel=1e-9)


def test_latents_that_are_set_move_activations_along_their_directions(alone):
    steer = SAEEdit(point="*", folder=str(alone / "sae"), latents={"5": 2.0}).build(at := context(), taps=None)
    x, point = torch.randn(2, 3, 16, dtype=torch.float64), "layers.0.resid_post"
    coder = load(alone / "sae" / point)
    moved = steer.apply(x, where(point)) - x
    torch.testing.assert_close(moved, (2.0 - coder.encode(x)[..., 5:6]) * coder.W_dec[5])
    whole = SAEEdit(point="*", folder=str(alone / "sae"), keep_error=False).build(at, taps=None)
    torch.testing.assert_close(whole.apply(x, where(point)), coder(x))


def test_an_edit_is_on_in_evaluations_that_name_it(alone, tmp_path):
    folder = str(alone / "sae")
    edits = {
        "whole": SAEEdit(point="*.resid_post", folder=folder, keep_error=False),
        "loud": SAEEdit(point="layers.1.resid_post", folder=folder, latents={"3": 50.0}),
    }
    ended = lines(run(job(tmp_path, sinks={}, taps={"edits": edits}, evaluations={"ablate": Ablate()})))
    change = {name: ended[-1][f"ablate/{name}/change"] for name in edits}
    assert 0 < change["whole"] < change["loud"]
    assert [line["loss"] for line in ended if "loss" in line] == [
        line["loss"] for line in lines(alone) if "loss" in line
    ]


def test_edits_that_cannot_be_are_refused(alone, tmp_path):
    edits = {
        "a": SAEEdit(point="layers.0.resid_post", folder=str(alone / "sae")),
        "b": SAEEdit(point="layers.0.resid_post", folder="nowhere", latents={"x": 1.0}),
    }
    check_problems(
        problems_of(job(tmp_path, taps={"edits": edits}, evaluations={"e": LossRecovered(sink="s")})),
        at("parallel.taps.edits.a.latents", "keep_error"),
        at("parallel.taps.edits.b.latents", "'x'"),
        at("parallel.taps.edits.b.folder", "nowhere"),
        at("evaluations.e.sink", "'s'", "sae"),
    )
    hidden = {"layers.0.mlp_hidden": TapPoint("layers.0.ffn.down", "input", axes="hidden")}
    check_problems(edits["a"].point_problems(hidden, Layout(tp=2)), at("point", "layers.0.mlp_hidden"))
    assert not list(edits["a"].point_problems(hidden, Layout()))
    for point, latents, facts in (
        ("layers.7.resid_post", {"1": 1.0}, ["layers.7.resid_post", "layers.0.resid_post"]),
        ("layers.0.resid_post", {"24": 1.0}, ["24 latents", "number 24"]),
    ):
        edit = SAEEdit(point="*", folder=str(alone / "sae"), latents=latents).build(context(), taps=None)
        with pytest.raises(ForgeError, match=naming(*facts)):
            edit.apply(torch.zeros(1, 1, 16), where(point))
    edit = SAEEdit(point="*", folder=str(alone / "transcoders"), latents={"1": 1.0}).build(context(), taps=None)
    with pytest.raises(ForgeError, match=naming("transcoder")):
        edit.apply(torch.zeros(1, 1, 16), where("layers.0.resid_pre"))


def test_a_part_of_the_features_has_no_latents():
    """An edit of a job that was not checked: `point_problems` finds it before."""
    edit = SAEEdit(point="*", folder="saes", latents={"1": 1.0}).build(context(), taps=None)
    divided = SimpleNamespace(point="layers.0.mlp_hidden", split=Split(0, 8, 16))
    with pytest.raises(ForgeError, match=naming("layers.0.mlp_hidden", "tensor parallel")):
        edit.apply(torch.zeros(1, 1, 8), divided)


def test_a_transcoder_whose_input_comes_after_its_output_is_refused():
    coder = SparseCoder(TopK(k=1).activation(4), 2, 4, 2)
    with pytest.raises(ForgeError, match=naming("layers.0.resid_pre", "after its output")):
        Reconstruct(coder, Remember()).apply(torch.zeros(1, 1, 2), where("layers.0.resid_pre"))


def test_an_evaluation_of_a_sink_that_does_not_run_or_is_divided_is_refused(tmp_path):
    """The check of a job finds the first; the second depends on the layout."""
    taps = {"points": ("layers.0.resid_post",)}
    recorder = recorder_of(tiny_run(tmp_path, model=Stranger(), parallel={"taps": Taps(**taps)}).model)
    model = SimpleNamespace(taps_recorder=recorder)
    with pytest.raises(ForgeError, match=naming("'sae'")):
        LossRecovered().evaluate(SimpleNamespace(model=model, held_out=()))
    points = {"layers.0.mlp_hidden": PointInfo("hidden", 0)}
    divided = SimpleNamespace(device=torch.device("cpu"), layout=Layout(tp=2))
    info = TapsInfo(points=points, interval=1, rows=8, positions=8, length=8)
    recorder.sinks = {"sae": sae().build(divided, info)}
    with pytest.raises(ForgeError, match=naming("layers.0.mlp_hidden", "tensor parallel")):
        LossRecovered().evaluate(SimpleNamespace(model=model, held_out=()))


def context():
    return SimpleNamespace(device=torch.device("cpu"))


def where(point):
    return SimpleNamespace(point=point, split=None)
