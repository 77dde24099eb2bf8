"""What a sample holds, beside hooks of torch's own that keep whole tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import taps_stranger
import torch
from attrs import define, evolve, field, frozen
from safetensors.torch import load_file

import forge_plugin_taps
from forge_core.config.load import load_job
from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import ForgeError
from forge_core.engine.trainer import Trainer
from forge_plugin_taps import Store, Taps, recorder_of
from forge_plugin_taps.capture import Capture, Drawn, Part
from forge_plugin_taps.hook import TapsHook
from forge_plugin_taps.sampling import chosen_positions
from forge_plugin_text.packing import Isolate
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, RandomDocuments, tiny_job
from forge_testing.refusals import at, naming, refuses, refuses_all
from forge_testing.runs import tiny_run

WATCHED = {
    "layers.1.resid_post": ("layers.1", lambda args, out: out[0]),
    "layers.0.attn_out": ("layers.0.attention", lambda args, out: out),
    "layers.1.mlp_hidden": ("layers.1.ffn.down", lambda args, out: args[0]),
    "layers.0.k": ("layers.0.attention.core", lambda args, out: args[1]),
    "final_norm": ("norm", lambda args, out: out),
}


@define(kw_only=True, slots=False)
class Witness(TrainingHook):
    """Keeps whole tensors, their gradients and the batch of step 2."""

    def __attrs_post_init__(self) -> None:
        self.values: dict[str, list[torch.Tensor]] = {name: [] for name in WATCHED}
        self.batches: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, context):
        if context.step != 2:
            return
        self.batches = [dict(batch) for batch in context.batches]
        for name, (module, read) in WATCHED.items():
            context.model.get_submodule(module).register_forward_hook(self._keeper(name, read))

    def _keeper(self, name, read):
        def keep(module, args, out):
            tensor = read(args, out)
            if len(self.values[name]) < 2 and tensor.requires_grad:
                tensor.retain_grad()
                self.values[name].append(tensor)

        return keep


@define(kw_only=True, slots=False)
class FrozenEmbedding(TrainingHook):
    def on_train_begin(self, context):
        context.model.embedding.weight.requires_grad_(False)


@define
class Run:
    folder: Path
    witness: Witness = field(factory=Witness)

    def stored(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "run" / "taps" / "step-2" / f"{name}.safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory, catalog):
    """Two micro-batches of two packed sequences, in float64, with taps at every point."""
    run = Run(tmp_path_factory.mktemp("runs"))
    attention = GroupedQueryAttention(heads=4, kv_heads=2, window=5, soft_cap=2.0, sinks=True)
    taps = Taps(interval=2, positions="all", points=("*",), gradients=("*",), sinks={"store": Store()})
    job = tiny_job(
        str(run.folder),
        catalog,
        model=Transformer(vocab_size=32, dim=16, layers=2, init_std=0.2, attention=attention),
        data={"sources": (RandomDocuments(held_out=5),), "packing": Isolate()},
        precision="fp64",
        seq_len=16,
        steps=3,
        micro_batch_size=2,
        parallel={"taps": taps},
    )
    Trainer(job, hooks=[run.witness]).run()
    return run


@pytest.mark.parametrize("name", WATCHED)
def test_values_and_gradients_are_those_of_the_sampled_tokens(run, name):
    whole = run.witness.values[name]
    assert torch.equal(run.stored(name)[name], torch.cat(whole).detach().flatten(0, 1))
    assert torch.equal(run.stored(f"{name}.grad")[f"{name}.grad"], torch.cat([x.grad for x in whole]).flatten(0, 1))


def test_tokens_say_where_each_sample_is_from(run):
    tokens, batches = run.stored("tokens"), run.witness.batches
    for column, entry in (("id", "input_ids"), ("label", "labels"), ("document", "document_ids")):
        assert torch.equal(tokens[column], torch.cat([batch[entry] for batch in batches]).flatten()), column
    assert torch.equal(tokens["position"], torch.arange(16).repeat(4))
    assert torch.equal(tokens["row"], torch.arange(4).repeat_interleave(16))
    numbers = torch.cat([batch["numbers"] for batch in batches])
    assert torch.equal(tokens["sequence"], numbers.repeat_interleave(16))
    assert tokens["step"].unique().tolist() == [2]


def test_the_pattern_mixes_values_to_what_the_kernel_makes_of_them(run):
    """With documents, a window, a soft cap and sinks: the weights are computed apart from the kernel."""
    pattern, v, z = (run.stored(f"layers.1.{point}")[f"layers.1.{point}"] for point in ("pattern", "v", "z"))
    v = v.view(4, 16, 2, -1).repeat_interleave(2, 2)
    mixed = torch.einsum("bnhs,bshe->bnhe", pattern.view(4, 16, 4, 16), v)
    torch.testing.assert_close(mixed, z.view_as(mixed), rtol=0, atol=1e-13)
    assert pattern.sum(-1).max() < 1  # sinks take their share


def test_positions_are_a_function_of_seed_step_and_row():
    rows = chosen_positions(42, 10, [0, 1, 2, 3], 64, 8)
    assert (chosen_positions(42, 10, [3, 1], 64, 8) == rows[[3, 1]]).all()
    for other in (chosen_positions(43, 10, [0, 1, 2, 3], 64, 8), chosen_positions(42, 11, [0, 1, 2, 3], 64, 8)):
        assert (other != rows).any(1).all()
    assert rows[0].tolist() == [4, 5, 13, 24, 31, 43, 59, 63]  # a store of today can be compared with later ones


def test_every_position_is_equally_likely():
    counts = torch.from_numpy(chosen_positions(0, 1, range(4000), 32, 4)).flatten().bincount(minlength=32).double()
    expected = 4000 * 4 / 32
    chi_squared = ((counts - expected) ** 2 / (expected * (1 - 4 / 32))).sum() * 31 / 32
    assert chi_squared < 61.1  # 1 in 1000 with 31 degrees of freedom


JOB = """
[train]
steps = 200
global_batch_size = 4
seq_len = 8
[model]
type = "transformer"
dim = 16
layers = 2
vocab_size = 32
attention = { heads = 2 }
[[data.sources]]
type = "forge_testing:Numbers"
[optimizer]
type = "forge_testing:TinyAdamW"
[parallel.taps]
"""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ('points = ["layers.*.resid_pst"]', at("parallel.taps.points.0", "'layers.*.resid_post'")),
        ('gradients = ["layers.0.pattern"]', at("parallel.taps.gradients.0", "'layers.0.pattern'")),
        ('[parallel.taps.sinks.store]\npoints = ["*.q"]', at("parallel.taps.sinks.store.points.0", "'*.q'")),
        ("positions = 0", at("parallel.taps.positions", 1, "'all'", 0)),
    ],
)
def test_a_point_that_does_not_exist_is_refused_when_the_job_is_checked(lines, expected):
    with refuses_all(expected):
        load_job(JOB + lines)


def test_a_model_without_points_is_refused():
    with refuses("parallel.taps", "TinyNetwork", "tap_points()"):
        load_job(
            JOB.replace('type = "transformer"', 'type = "forge_testing:TinyModel"').replace(
                "vocab_size = 32\nattention = { heads = 2 }\n", ""
            )
        )


@frozen(kw_only=True)
class Looped(taps_stranger.Stranger):
    """Its last layer is called again behind the layers."""

    def build(self, context):
        model = super().build(context)
        before = model.finish
        model.finish = lambda carry, batch: before(model.layers["1"](carry, batch), batch)
        return model


@pytest.mark.parametrize("kind", ["points", "gradients"])
def test_a_module_that_is_called_twice_in_a_pass_is_refused_by_name(tmp_path, kind):
    made = taps_stranger.job(tmp_path, points=(), sinks={"store": Store()})
    taps = evolve(made.parallel["taps"], **{"points": ("layers.0.*",), kind: ("layers.1.resid_post",)})
    with pytest.raises(ForgeError, match=naming("layers.1.resid_post")):
        taps_stranger.run(evolve(made, model=Looped(), parallel={"taps": taps}))


def test_a_point_that_nothing_passed_has_no_parts():
    drawn = Drawn(*4 * [np.zeros((1, 1), np.int64)], columns={})
    part = Part(0, (2,), torch.float32, None, counted=True, at_rest=False)
    parts = {"embed": [part], "elsewhere": [evolve(part, counted=False)]}
    capture = Capture(3, [drawn], {"embed": torch.zeros(1, 1, 2)}, parts, rows=1, device=torch.device("cpu"))
    assert capture.parts("embed") == [part]
    for name in ("layers.0.router", "elsewhere"):
        with pytest.raises(ForgeError, match=naming("step 3", name)):
            capture.parts(name)


def test_no_more_sequences_are_recorded_than_a_step_has(tmp_path):
    settings = {"global_batch_size": 4, "micro_batch_size": 2, "parallel": {"taps": Taps(points=("embed",))}}
    model = Transformer(vocab_size=32, dim=16, layers=1, attention=GroupedQueryAttention(heads=2))
    recorder = recorder_of(tiny_run(tmp_path, model=model, **settings).model)
    recorder.agree()
    recorder.begin(5)
    for rows in (2, 2, 2, 2):  # all of them twice, as a plugin may compute them
        recorder.mark({"input_ids": torch.zeros(rows, 8, dtype=torch.int64)})
    with pytest.raises(ForgeError, match=naming("step 5", 4)):
        recorder.mark({"input_ids": torch.zeros(5, 8, dtype=torch.int64)})


def test_a_model_without_the_stage_has_no_recorder():
    with pytest.raises(ForgeError, match=naming("[parallel.taps]")):
        recorder_of(torch.nn.Linear(1, 1))


def test_a_run_loop_without_its_surroundings_cannot_record():
    """As one of an earlier version, or of another library."""
    with pytest.raises(ForgeError, match=naming("[parallel.taps]", "`build`")):
        TapsHook(component=Taps()).on_train_begin(SimpleNamespace(build=None))


def test_the_package_has_the_names_that_it_lists_and_no_others():
    for name in forge_plugin_taps.__all__:
        assert getattr(forge_plugin_taps, name) is not None
    assert not hasattr(forge_plugin_taps, "Recoder")


def test_a_gradient_that_no_point_has_is_said_once(tmp_path, catalog):
    taps = Taps(interval=1, points=("embed",), gradients=("layers.0.resid_pre", "final_norm"), sinks={"store": Store()})
    model = Transformer(vocab_size=32, dim=16, layers=1, attention=GroupedQueryAttention(heads=2))
    settings = {"model": model, "data": {"sources": (Numbers(),)}, "parallel": {"taps": taps}, "steps": 2}
    with pytest.warns(UserWarning, match=naming("step 1", "layers.0.resid_pre.grad")) as warnings:
        Trainer(tiny_job(str(tmp_path), catalog, **settings), hooks=[FrozenEmbedding()]).run()
    assert len([warning for warning in warnings if "taps" in str(warning.message)]) == 1
    stored = {path.stem for path in (tmp_path / "run" / "taps" / "step-2").glob("*.safetensors")}
    assert stored == {"embed", "final_norm.grad", "tokens"}
