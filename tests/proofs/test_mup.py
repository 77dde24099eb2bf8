"""`mup.py`: rates by role, tables of groups, widths that learn alike, two ranks."""

from __future__ import annotations

import pytest
import torch
from attrs import define

from forge_core import TrainingHook
from forge_testing import curves
from forge_testing.curves import Difference
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, refuses, refuses_all

WIDE = """
model = { dim = 64 }
scheduler.type = "rex"
optimizer.weight_decay = 0.1
"""
MUP = """
[plugins.mup]
type = "PROOFS/mup.py:MuP"
base.dim = 16
"""


@define(kw_only=True, slots=False)
class Watch(TrainingHook):
    """Rate and decay of every parameter, and the logits of fixed ids, at each step."""

    def __attrs_post_init__(self):
        self.rates, self.decays, self.logits = [], [], []  # no fields: those would be state

    def on_gradients(self, context):
        groups = context.optimizer.param_groups
        self.rates.append({name: group["lr"] for group in groups for name in group["names"]})
        self.decays.append({name: group["weight_decay"] for group in groups for name in group["names"]})
        with torch.no_grad():
            ids = torch.arange(32)[None]
            self.logits.append(context.model.head.logits(context.model({"input_ids": ids})))


def watched(job, train):
    watch = Watch()
    train(job, watch)
    return watch


def test_matrices_have_their_share_of_the_rate_at_every_step(job_of, train, records):
    watch = watched(job_of("mup", WIDE + MUP), train)
    plain = watched(job_of("plain", WIDE), train)
    assert len({rates["embedding.weight"] for rates in plain.rates}) == 4  # the schedule moves
    for found, usual in zip(watch.rates, plain.rates, strict=True):
        for name, rate in found.items():
            hidden = name in {f"layers.{n}.{part}.weight" for n in (0, 1) for part in ("up", "down")}
            assert rate == pytest.approx(usual[name] * (16 / 64 if hidden else 1), rel=1e-12), name


def test_the_rate_times_the_decay_stays(job_of, train):
    watch, plain = (watched(job_of(name, WIDE + text), train) for name, text in (("mup", MUP), ("plain", "")))
    for name, decay in watch.decays[0].items():
        assert watch.rates[0][name] * decay == pytest.approx(plain.rates[0][name] * plain.decays[0][name]), name


def test_a_rate_in_a_table_of_groups_is_taken_as_written(job_of, train):
    table = '[[optimizer.groups]]\nmatch = "layers.1.up.weight"\nlr = 0.5\n'
    watch = watched(job_of("mup", WIDE + table + MUP), train)
    first = watch.rates[0]
    factor = first["embedding.weight"] / 1e-2
    assert first["layers.1.up.weight"] == pytest.approx(0.5 * factor)
    assert first["layers.0.up.weight"] == pytest.approx(0.25e-2 * factor)


def test_logits_of_all_widths_move_alike(job_of, train):
    """The paper's coordinate check; without the plugin they move the more the wider the model is."""

    def moved(name, text, width):
        watch = watched(job_of(name, text, f"--model.dim={width}", "--optimizer.lr=1e-2"), train)
        return (watch.logits[-1] - watch.logits[0]).std().item()

    with_mup, plain = ([moved(f"{name}-{w}", text, w) for w in (16, 256)] for name, text in (("m", MUP), ("p", "")))
    assert with_mup[0] == plain[0]  # the base is left as it is
    assert with_mup[1] < 2 * with_mup[0]
    assert plain[1] > 5 * plain[0]


def test_two_ranks_train_like_one(job_of, catalog):
    text = WIDE + 'train.precision = "fp64"\n' + MUP
    expected = curves.train(job_of("one", text), catalog)
    layouts = {"fsdp": [], "pp": ["--parallel.pp.degree=2", "--parallel.pp.schedule=gpipe"]}
    jobs = [job_of(name, text, f"--parallel.{name}.type={name}", *keys, ranks=2) for name, keys in layouts.items()]
    for found_by_rank in run_on_ranks(2, lambda rank: [curves.train(job, catalog) for job in jobs]):
        for found, layout in zip(found_by_rank, layouts, strict=True):
            difference = Difference.between(found, expected)
            assert max(difference.initial, difference.loss, difference.norm, difference.gradient) < 1e-9, layout
            assert difference.weights < 1e-7, layout


def test_a_key_that_the_model_lacks_is_refused(job_of):
    with refuses_all(at("model", "'width'"), at("plugins.mup.base.width", "dim, layers")):
        job_of("wrong", MUP.replace("base.dim", "base.width"))


def test_a_base_of_another_depth_is_refused(job_of, build):
    with refuses("plugins.mup.base", "layers.1.up.weight"):
        build(job_of("shallow", MUP.replace("base.dim = 16", "base.layers = 1")))
