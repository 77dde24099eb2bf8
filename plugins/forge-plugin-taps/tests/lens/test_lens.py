"""Reading, changing and showing what a model does inside."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import forge_plugin_taps.lens
from forge_core.cli import main
from forge_core.contracts.errors import ForgeError
from forge_kit.nn.taps import TapPoint
from forge_plugin_linear_attention import GatedDeltaNet
from forge_plugin_mla import MultiHeadLatentAttention
from forge_plugin_taps.lens import (
    attention_command,
    attention_maps,
    attention_weights,
    logit_lens,
    patching_effects,
    read_points,
)
from forge_plugin_taps.lens.attention_command import numbers
from forge_plugin_transformer import AttentionPattern, GroupedQueryAttention, SwiGLU, Transformer
from forge_testing.refusals import lacks, naming
from forge_testing.runs import tiny_run

HEADS = {"heads": 4, "kv_heads": 2}
ATTENTIONS = {
    "grouped": GroupedQueryAttention(**HEADS, qk_norm=True),
    "window and scale": GroupedQueryAttention(**HEADS, window=5, scale=0.4),
    "cap": GroupedQueryAttention(**HEADS, soft_cap=0.5),
    "sinks": GroupedQueryAttention(**HEADS, sinks=True, window=7),
    "latent": MultiHeadLatentAttention(heads=4, kv_lora_rank=6, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5),
}
IDS = torch.arange(16) * 7 % 32


def network(folder, attention=ATTENTIONS["grouped"]):
    ffn = SwiGLU(hidden=24)
    component = Transformer(vocab_size=32, dim=16, layers=3, init_std=0.4, attention=attention, ffn=ffn)
    return tiny_run(folder, model=component, precision="fp64", seq_len=16).model.eval()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_maps_times_the_values_are_what_the_kernel_returns(tmp_path, name):
    model = network(tmp_path, ATTENTIONS[name])
    values = read_points(model, {"input_ids": IDS[None]}, ["layers.*.v", "layers.*.z"]).values
    maps = attention_maps(model, IDS)
    for layer in range(3):
        v, z = (values[f"layers.{layer}.{point}"] for point in "vz")
        v = v.repeat_interleave(4 // v.shape[2], 2)
        mixed = torch.einsum("hst,bthe->bshe", maps.weights[layer], v)
        assert z.std() > 0.01
        assert (mixed - z).abs().max() < 1e-12


def test_the_stream_is_the_sum_of_what_parts_add(tmp_path):
    values = read_points(network(tmp_path), {"input_ids": IDS[None]}, ["layers.*"]).values
    for layer in range(3):
        pre, mid, post, attention, ffn = (
            values[f"layers.{layer}.{point}"]
            for point in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
        )
        assert torch.equal(pre + attention, mid)
        assert torch.equal(mid + ffn, post)


def test_a_change_goes_on_from_its_point(tmp_path):
    model, batch = network(tmp_path), {"input_ids": IDS[None]}
    plain = read_points(model, batch, ["layers.1.mlp_out", "layers.1.resid_post"]).values
    reading = read_points(model, batch, ["layers.1.resid_post"], {"layers.1.mlp_out": torch.zeros_like})
    without = plain["layers.1.resid_post"] - plain["layers.1.mlp_out"]
    assert (reading.values["layers.1.resid_post"] - without).abs().max() < 1e-14
    again = read_points(model, batch, ["layers.1.mlp_out"]).values["layers.1.mlp_out"]
    assert torch.equal(again, plain["layers.1.mlp_out"])


def test_the_last_row_of_the_lens_is_the_model(tmp_path):
    model = network(tmp_path)
    lens = logit_lens(model, IDS, 3)
    with torch.no_grad():
        expected = model.head.logits(model({"input_ids": IDS[None]}))[0].softmax(-1).topk(3)
    assert torch.equal(lens.top[-1], expected.indices)
    assert (lens.probabilities[-1] - expected.values).abs().max() < 1e-14
    assert lens.divergence[-1].abs().max() == 0
    assert (lens.divergence[:-1] > 0).all()


def test_patching_brings_back_the_answer_where_the_prompts_differ_and_at_the_end(tmp_path):
    model, other = network(tmp_path), IDS.clone()
    other[4] = 9
    effects = patching_effects(model, IDS.tolist(), other.tolist(), 3, 5, ["layers.0.resid_pre", "layers.2.resid_post"])
    first, last = torch.zeros(2, 16, dtype=torch.float64)
    first[4] = last[-1] = 1
    assert (effects.effects - torch.stack([first, last])).abs().max() < 1e-9


class Core:
    def mixing(self):
        return {}


def test_positions_of_a_span_attend_to_each_other():
    q = torch.zeros(1, 4, 2, 3)
    batch = {"attention_spans": torch.tensor([[0, 0, 0, -1]]), "document_ids": torch.tensor([[0, 0, 1, 1]])}
    seen = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]])
    weights = attention_weights(Core(), q, q, batch)
    assert torch.equal(weights, (seen / seen.sum(1, keepdim=True)).expand(1, 2, 4, 4))


def test_a_pattern_of_unknown_attention_is_refused():
    with pytest.raises(ValueError, match=naming("'mixing'", "'alibi'")):
        TapPoint("core", "pattern", mixing={"alibi": 8.0})


def test_layers_without_weights_of_attention_are_left_out_and_refused_by_name(tmp_path):
    kinds = {"delta": GatedDeltaNet(heads=4), "full": ATTENTIONS["grouped"]}
    model = network(tmp_path, AttentionPattern(kinds=kinds, layers=("delta", "full")))
    assert attention_maps(model, IDS).layers == ["1"]
    with pytest.raises(ForgeError, match=naming("layer 2", "DeltaCore")):
        attention_maps(model, IDS, [1, 2])


def test_what_does_not_fit_is_refused(tmp_path):
    model = network(tmp_path)
    with pytest.raises(ForgeError, match=naming("TransformerModel", "'layers.0.resid_pots'", "resid_post")):
        read_points(model, {"input_ids": IDS[None]}, ["layers.0.resid_pots"])
    with pytest.raises(ForgeError, match=naming("16 and 15")):
        patching_effects(model, IDS.tolist(), IDS[1:].tolist(), 3, 5)
    with pytest.raises(ForgeError, match=naming("layer 3", "0 to 2")):
        attention_maps(model, IDS, [3])
    with pytest.raises(ForgeError, match=naming("head 4", 4)):
        attention_maps(model, IDS, [0], [3, 4])
    with pytest.raises(ForgeError, match=naming("head -1", 4)):
        attention_maps(model, IDS, [0], [-1])
    for layers, heads in (([], None), ([0], [])):
        with pytest.raises(ForgeError, match="no layer or no head"):
            attention_maps(model, IDS, layers, heads)
    with pytest.raises(ForgeError, match=naming("layers.1.mlp_out", "(1, 15, 16)", "(1, 16, 16)")):
        read_points(model, {"input_ids": IDS[None]}, [], {"layers.1.mlp_out": lambda x: x[:, 1:]})
    with pytest.raises(ForgeError, match=naming("no effect")):
        patching_effects(model, IDS.tolist(), IDS.tolist(), 3, 5)


def test_layers_of_other_numbers_of_heads_and_without_any_are_refused(tmp_path, monkeypatch):
    few, more = (GroupedQueryAttention(heads=heads, kv_heads=2) for heads in (2, 4))
    pattern = AttentionPattern(kinds={"few": few, "more": more}, layers=("few", "more", "more"))
    model = network(tmp_path, pattern)
    with pytest.raises(ForgeError, match=naming("[2, 4]")):
        attention_maps(model, IDS)
    assert attention_maps(model, IDS, heads=[1]).weights.shape == (3, 1, 16, 16)
    with pytest.raises(ForgeError, match=naming("head 2", 2)):
        attention_maps(model, IDS, heads=[2])
    monkeypatch.setattr(model, "sequence_mixers", lambda: {"layers.1.attention.core"})
    with pytest.raises(ForgeError, match=naming("layer 0", "TransformerModel", "sequence_mixers()")):
        attention_maps(model, IDS)


class Flat(nn.Module):
    """(B, S, D) -> (B x S, D)."""

    def forward(self, x):
        return x.flatten(0, 1)


@pytest.mark.parametrize("length", [3, 4])
def test_points_that_are_not_by_position_are_not_patched(tmp_path, length):
    """With 4 positions, 16 rows of 16 numbers look like one row a position."""
    model = network(tmp_path)
    model.flat, model.unused = Flat(), Flat()

    def pass_through(module, args, out):
        model.flat(out)

    model.embedding.register_forward_hook(pass_through)
    points = {name: TapPoint(name) for name in ("flat", "unused")}
    model.tap_points = lambda: points
    prompts = IDS[:length].tolist(), (IDS[:length] + 1).tolist()
    with pytest.raises(ForgeError, match=naming(f"({length**2}, 16)", "--points")):
        patching_effects(model, *prompts, 3, 5, ["flat"])
    with pytest.raises(ForgeError, match=naming("unused", "--points")):
        patching_effects(model, *prompts, 3, 5, ["unused"])


def test_a_model_without_points_is_refused():
    with pytest.raises(ForgeError, match=naming("Linear", "tap_points()")):
        read_points(torch.nn.Linear(2, 2), {"input_ids": IDS[None]}, ["*"])


def test_attention_of_an_unknown_kind_has_no_weights():
    core, q = Core(), torch.zeros(1, 4, 2, 3)
    core.mixing = lambda: {"alibi": 8.0}
    with pytest.raises(ForgeError, match=naming("Core", "alibi")):
        attention_weights(core, q, q, {})


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "3-1", "1-2-3"])
def test_lists_of_layers_that_are_none_are_refused(capsys, text):
    with pytest.raises(SystemExit, match="2"):
        main(["inside", "attention", "run", "--prompt", "a", f"--layers={text}"])
    assert "--layers" in capsys.readouterr().err


def test_lists_of_layers_are_numbers_and_ranges():
    assert numbers("0,3-5,2-2") == [0, 3, 4, 5, 2]


def test_a_model_without_a_tokenizer_reads_no_prompts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("forge_core.load_model", lambda *args, **keys: SimpleNamespace(tokenizer=None))
    assert main(["inside", "lens", str(tmp_path), "--prompt", "a"]) == 1
    assert not lacks(capsys.readouterr().err, tmp_path, "tokenizer")


def test_the_package_has_no_other_names():
    with pytest.raises(AttributeError, match=naming("forge_plugin_taps.lens", "lens_of_logits")):
        forge_plugin_taps.lens.lens_of_logits  # noqa: B018


JOB = """
[train]
steps = 1
global_batch_size = 2
seq_len = 16
[model]
type = "transformer"
dim = 16
layers = 2
attention = { type = "gqa", heads = 2 }
[optimizer]
type = "forge_testing:TinyAdamW"
[data.tokenizer]
type = "bytes"
[[data.sources]]
type = "text"
path = "text.txt"
held_out_every = 0
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("FORGE_CACHE", str(folder / "cache"))
        Path("text.txt").write_text("one two three " * 40)
        Path("job.toml").write_text(JOB)
        assert main(["run", "job.toml"]) == 0
    return folder


def test_commands_write_tables_and_pictures(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)

    def run(*argv: str) -> str:
        assert main(list(argv)) == 0
        return capsys.readouterr().out

    table = run("inside", "lens", "runs/run", "--prompt", "one two", "--top", "2").splitlines()
    assert [line.split()[0] for line in table] == ["layer", "embed", "layers.0", "layers.1", "picture:"]
    assert "layers.1.resid_post" in run("inside", "lens", "runs/run", "--list").splitlines()
    assert (
        len(
            run(
                "inside", "attention", "runs/run/checkpoints/step-1", "--prompt", "one two", "--layers", "1"
            ).splitlines()
        )
        == 4
    )
    patched = run(
        "inside", "patch", "runs/run", "--clean", "one", "--corrupted", "two", "--answer", "a", "--other", "b"
    )
    assert patched.startswith("logit(a) - logit(b): clean")
    for name in ("lens", "attention", "patch"):
        assert Path(f"runs/run/{name}.png").read_bytes().startswith(b"\x89PNG")
    prompts = ["inside", "patch", "runs/run", "--clean", "one", "--corrupted", "two"]
    assert main([*prompts, "--answer", "ab"]) == 2
    assert not lacks(capsys.readouterr().err, "'ab'", "2 tokens")
    assert main([*prompts, "--answer", "a", "--other", "a"]) == 2
    assert not lacks(capsys.readouterr().err, "a", "--answer", "--other")
    assert main(["inside", "lens", "runs/run", "--prompt", ""]) == 2
    assert not lacks(capsys.readouterr().err, "''", "tokens")
    for most, code in ((1, 2), (2, 0)):
        monkeypatch.setattr(attention_command, "MOST", most)
        assert main(["inside", "attention", "runs/run", "--prompt", "one", "--layers", "1"]) == code
    assert not lacks(capsys.readouterr().err, "2 maps", 1, "--layers", "--heads")
    for option in (["--prompt", "a"], ["--out", "a.png"]):
        with pytest.raises(SystemExit, match="2"):
            main(["inside", "lens", "runs/run", "--list", *option])
        assert not lacks(capsys.readouterr().err, "--list", *option[:1])


@pytest.fixture
def inside(trained, monkeypatch, capsys):
    """Runs `forge-run inside …` and returns the lines that it prints, and what it prints as JSON."""
    monkeypatch.chdir(trained)

    def both(*words):
        assert main(["inside", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert main(["inside", *words, "--json"]) == 0
        return lines, json.loads(capsys.readouterr().out)

    return both


def test_json_of_the_lens_has_the_predictions_of_table_and_picture(inside):
    lines, facts = inside("lens", "runs/run", "--prompt", "one two", "--top", "2", "--last", "3", "--out", "lens.png")
    assert (facts["run"], facts["step"], facts["prompt"]) == ("runs/run", 1, "one two")
    assert "".join(token["text"] for token in facts["tokens"]) == "one two"
    assert [layer["point"] for layer in facts["layers"]] == ["embed", "layers.0.resid_post", "layers.1.resid_post"]
    for layer, line in zip(facts["layers"], lines[1:-1], strict=True):
        assert [position["position"] for position in layer["positions"]] == [4, 5, 6]
        last = layer["positions"][-1]
        cells = [f"{token['probability']:.3f}" for token in last["top"]]
        shown = line.split()
        assert shown[1] == f"{last['divergence']:.3f}"
        assert [shown[3], shown[5]] == cells
    assert f"picture: {facts['picture']}" == lines[-1] == "picture: lens.png"
    lines, facts = inside("lens", "runs/run", "--list")
    assert facts["points"] == lines


def test_json_of_attention_has_the_figures_of_each_head(inside):
    lines, facts = inside("attention", "runs/run", "--prompt", "one two", "--layers", "1")
    rows = [
        [head["layer"], str(head["head"]), *(f"{head[name]:.3f}" for name in ("entropy", "itself", "before", "first"))]
        for head in facts["heads"]
    ]
    assert [line.split() for line in lines[1:-1]] == rows
    assert lines[-1] == f"picture: {facts['picture']}"
    assert len(facts["tokens"]) == len("one two")


def test_json_of_patching_has_the_effect_at_each_point_and_position(inside):
    prompts = ["--clean", "one", "--corrupted", "two", "--answer", "a", "--other", "b"]
    lines, facts = inside("patch", "runs/run", *prompts)
    measures = [facts[side]["logit_difference"] for side in ("clean", "corrupted")]
    assert lines[0].endswith("clean {:.3f}, corrupted {:.3f}".format(*measures))
    assert [facts[side]["answer"]["text"] for side in ("clean", "corrupted")] == ["a", "b"]
    assert facts["corrupted"]["prompt"] == "".join(token["text"] for token in facts["corrupted"]["tokens"]) == "two"
    for line, point in zip(lines[2:-1], facts["points"], strict=True):
        name, largest, place, _ = line.split()
        assert point["point"] == name
        assert f"{point['effects'][int(place)]:.3f}" == largest
        assert len(point["effects"]) == 3
    assert lines[-1] == f"picture: {facts['picture']}"
