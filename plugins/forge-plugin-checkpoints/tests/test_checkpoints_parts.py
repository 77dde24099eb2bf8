"""`[checkpoint.load]`: starting a new run from some of the weights of another."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from attrs import frozen

from forge_core import load_job
from forge_core.checkpoint.run_diff import text_changes
from forge_core.checkpoint.state import model_tensors
from forge_core.config.load import dump_job, parse_job
from forge_core.config.rules import check_rules
from forge_core.contracts.components import LoadComponent, OptimizerComponent, TrainingHook
from forge_core.contracts.errors import CheckpointError
from forge_core.engine.trainer import Trainer
from forge_core.plugins.catalog import Catalog
from forge_plugin_checkpoints.parts import Parts
from forge_testing import TINY_JOB, TinyModel, tiny_job
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import at, check_problems, lacks, naming, refuses, refuses_all
from forge_testing.tiny import VOCABULARY
from forge_testing.tiny_model import TinyNetwork


class Weights(TrainingHook):
    """Keeps the weights as they are before the first step and after the last."""

    def on_train_begin(self, context):
        self.step, self.slots = context.step, len(context.optimizer.state)
        self.first = copies(context.model)

    def on_train_end(self, context):
        self.last = copies(context.model)


def copies(model):
    return {name: tensor.detach().clone() for name, tensor in model_tensors(model).items()}


@frozen(kw_only=True)
class Sgd(OptimizerComponent):
    lr: float = 0.1

    def build(self, context, parameters):
        return torch.optim.SGD(parameters.groups(0.0), lr=self.lr)


class TiedNetwork(TinyNetwork):
    def __init__(self, *args):
        super().__init__(*args)
        self.head.weight = self.embedding.weight

    def tied_parameters(self):
        return {"head.weight": "embedding.weight"}

    def parameter_roles(self):
        return {"embedding.weight": "embedding"}


@frozen(kw_only=True)
class Tied(TinyModel):
    """Its head is its embedding table."""

    def build(self, context):
        return TiedNetwork(self.dim, self.layers, self.dropout, VOCABULARY, context.dtype)


@pytest.fixture
def base(make_job, train):
    """The weights of a run of two steps, in the run folder `base`."""
    kept = Weights()
    train(make_job(steps=2, job={"name": "base"}), kept)
    return kept.last


@pytest.fixture
def said():
    return []


@pytest.fixture
def start(make_job, train, said, tmp_path):
    """What a new run that loads from `base` starts with."""

    def run(load, **changes):
        kept = Weights()
        section = Parts(path=str(tmp_path / "base"), **load)
        train(make_job(**{"steps": 1} | changes, checkpoint={"load": section}), kept, echo=said.append)
        return kept

    return run


def loaded(base, found):
    """Names whose values are those of `base`."""
    return {name for name in base if name in found and torch.equal(found[name], base[name])}


def test_weights_come_over_and_nothing_else_does(base, start):
    begun = start({})
    assert loaded(base, begun.first) == set(base)
    assert (begun.step, begun.slots) == (0, 0)


def test_the_precision_may_be_another(base, start):
    found = start({}, precision="fp64").first
    assert {tensor.dtype for tensor in found.values()} == {torch.float64}
    assert all(torch.equal(found[name], tensor.double()) for name, tensor in base.items())


def test_the_checkpoint_itself_may_be_named(base, make_job, train, tmp_path):
    kept = Weights()
    section = Parts(path=str(tmp_path / "base/checkpoints/step-2"))
    train(make_job(steps=1, checkpoint={"load": section}), kept)
    assert loaded(base, kept.first) == set(base)


def test_the_optimizer_may_be_another(base, start):
    assert loaded(base, start({}, optimizer=Sgd()).first) == set(base)


def test_patterns_choose_and_what_became_of_each_name_is_told(base, start, said):
    begun = start({"include": ("layers.*", "head.*"), "exclude": ("layers.1.*",)})
    assert loaded(base, begun.first) == {
        "layers.0.up.weight",
        "layers.0.up.bias",
        "layers.0.down.weight",
        "head.weight",
    }
    _, included, skipped = said[0].splitlines()
    assert not lacks(included, 4, "layers.0.up.weight, layers.0.up.bias, layers.0.down.weight, head.weight")
    names = "embedding.weight, layers.1.up.weight, layers.1.up.bias, layers.1.down.weight, norm.weight, norm.bias"
    assert not lacks(skipped, 6, "include", "exclude", names)


def test_what_only_the_checkpoint_has_is_told(base, start, said):
    start({}, model=TinyModel(layers=1))
    [line] = [line for line in said[0].splitlines() if "layers.1.up.weight" in line]
    assert not lacks(line, 3, "checkpoint", "layers.1.up.weight, layers.1.up.bias, layers.1.down.weight")


def test_long_lists_are_counted(make_job, train, start, said):
    train(make_job(steps=1, job={"name": "base"}, model=TinyModel(layers=9)))
    start({}, model=TinyModel(layers=9))
    assert "  31 loaded: embedding.weight, " in said[0]
    assert said[0].endswith(" and 23 more")


def test_a_selected_parameter_must_be_there_unless_told_otherwise(base, start, said, train, make_job):
    with pytest.raises(
        CheckpointError, match=naming("base/checkpoints/step-2", "layers.2.up.weight", "strict = false")
    ):
        start({}, model=TinyModel(layers=3))
    untouched = Weights()
    train(make_job(steps=1, job={"name": "untouched"}, model=TinyModel(layers=3)), untouched)
    begun = start({"strict": False}, model=TinyModel(layers=3))
    assert loaded(base, begun.first) == set(base)
    new = {name for name in begun.first if name.startswith("layers.2")}
    assert loaded(untouched.first, begun.first) == new
    [line] = [line for line in said[0].splitlines() if "layers.2.up.weight" in line]
    assert not lacks(line, len(new), "initial")


def test_another_shape_is_refused_with_both_and_the_key_that_excludes_it(base, start, monkeypatch):
    monkeypatch.setattr("forge_testing.tiny.VOCABULARY", 48)
    fix = 'exclude = ["embedding.weight", "head.weight"]'
    names = ("embedding.weight is [32, 16]", "head.weight is [32, 16]", "[48, 16]", f"[checkpoint.load]: {fix}")
    with pytest.raises(CheckpointError, match=naming(*names)):
        start({})
    begun = start({"exclude": ("embedding.weight", "head.weight")})
    assert loaded(base, begun.first) == set(base) - {"embedding.weight", "head.weight"}


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ({"include": ("layer.*",)}, at("checkpoint.load.include", "'layer.*'")),
        ({"exclude": ("haed.weight",)}, at("checkpoint.load.exclude", "'haed.weight'", "'head.weight'")),
    ],
)
def test_a_pattern_that_fits_nothing_is_a_mistake(base, start, load, expected):
    with refuses_all(expected):
        start(load)


def test_what_only_the_checkpoint_has_may_be_excluded(base, start):
    assert start({"exclude": ("layers.1.*",)}, model=TinyModel(layers=1)).step == 0


def test_a_tied_parameter_goes_by_any_of_its_names(make_job, train, start, said):
    train(make_job(steps=1, job={"name": "base"}, model=Tied()))
    start({"exclude": ("head.*",)}, model=Tied())
    [line] = [line for line in said[0].splitlines() if "embedding.weight" in line]
    assert not lacks(line, 1, "include", "exclude")


def test_weights_of_an_untied_model_are_not_lost_in_a_tied_one(base, start, said):
    with pytest.raises(CheckpointError, match=naming("head.weight (tied to embedding.weight)", "strict = false")):
        start({}, model=Tied())
    assert loaded(base, start({"exclude": ("head.*",)}, model=Tied()).first) == {
        name for name in base if name not in ("embedding.weight", "head.weight")
    }
    assert torch.equal(
        start({"strict": False}, model=Tied(), job={"name": "loose"}).first["embedding.weight"],
        base["embedding.weight"],
    )
    assert any(not lacks(line, 1, "head.weight") for text in said for line in text.splitlines())


def test_a_run_that_has_a_checkpoint_ignores_it_and_says_so_even_if_its_source_is_gone(
    base, make_job, train, start, said, tmp_path
):
    start({"exclude": ("head.*",)})
    shutil.rmtree(tmp_path / "base")
    section = Parts(path=str(tmp_path / "base"), exclude=("head.*",))
    assert train(make_job(steps=2, checkpoint={"load": section}), Weights(), echo=said.append).step == 2
    assert said[-2].startswith(f"continuing from {tmp_path}/run/checkpoints/step-1")
    assert not lacks(said[-2], "[checkpoint.load]")


def test_a_wrong_path_is_a_problem_of_the_job(base, make_job, catalog, tmp_path):
    def problems(path):
        job = make_job(checkpoint={"load": Parts(path=str(path))})
        return list(check_rules(job, catalog))

    assert problems(tmp_path / "base") == problems(tmp_path / "base/checkpoints/step-2") == []
    check_problems(problems(tmp_path / "bass"), at("checkpoint.load.path", f"'{tmp_path}/bass'", "'base'"))
    (tmp_path / "empty").mkdir()
    check_problems(problems(tmp_path / "empty"), at("checkpoint.load.path", "manifest.json", "run folder"))


def test_a_damaged_checkpoint_is_not_loaded(base, start, tmp_path):
    [file] = (tmp_path / "base/checkpoints/step-2").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    file_name = r"step-2/__0_0\.distcp .*SHA-256"
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(CheckpointError, match=file_name):
        start({})


def test_another_tokenizer_is_told(base, start, said, catalog):
    tokenizer = catalog.load("tokenizer", "forge-plugin-text/bytes")()
    start({}, data={"tokenizer": tokenizer})
    assert not lacks(said[0].splitlines()[-1], "tokenizer")


@pytest.mark.parametrize(("include", "told"), [("layers.*", False), ("embedding.*", True), ("head.*", True)])
def test_another_tokenizer_is_told_of_weights_that_belong_to_tokens(base, start, said, catalog, include, told):
    tokenizer = catalog.load("tokenizer", "forge-plugin-text/bytes")()
    start({"include": (include,)}, data={"tokenizer": tokenizer})
    assert said[0].startswith("weights from")
    assert ("another tokenizer" in said[0]) is told


def test_every_rank_gets_the_weights(base, tmp_path):
    def train_on(rank):
        kept = Weights()
        section = Parts(path=str(tmp_path / "base"), exclude=("norm.*",))
        job = tiny_job(str(tmp_path), steps=1, checkpoint={"load": section})
        Trainer(job, hooks=[kept], echo=lambda text: None).run()
        return kept.first

    expected = {name for name in base if not name.startswith("norm")}
    for found in run_on_ranks(2, train_on):
        assert loaded(base, found) == expected


# --- several tables ----------------------------------------------------------------------------------------------


@pytest.fixture
def other(make_job, train):
    """The weights of another run, in the run folder `other`."""
    kept = Weights()
    train(make_job(steps=1, job={"name": "other", "seed": 7}), kept)
    return kept.last


def job_file(folder, tables):
    """A job that loads from `base` and `other`, each with further keys."""
    loads = "".join(f'[[checkpoint.load]]\npath = "{folder}/{name}"\n{keys}\n' for name, keys in tables)
    (folder / "job.toml").write_text(f'job.output = "{folder}"\n{TINY_JOB.replace("steps = 4", "steps = 1")}{loads}')
    return folder / "job.toml"


LOWER = ("base", 'include = ["embedding.*", "layers.0.*"]')


def test_several_tables_take_parts_from_several_runs(base, other, said, tmp_path):
    job, kept = load_job(job_file(tmp_path, [LOWER, ("other", 'include = ["layers.1.*"]')])), Weights()
    Trainer(job, hooks=[kept], echo=said.append).run()
    assert loaded(base, kept.first) >= {"embedding.weight", "layers.0.up.weight", "layers.0.down.weight"}
    assert loaded(other, kept.first) >= {"layers.1.up.weight", "layers.1.up.bias", "layers.1.down.weight"}
    assert "head.weight" not in loaded(base, kept.first) | loaded(other, kept.first)
    lines = said[0].splitlines()
    assert [line for line in lines if line.startswith("weights from")] == [
        f"weights from {tmp_path}/base/checkpoints/step-2, step 2:",
        f"weights from {tmp_path}/other/checkpoints/step-1, step 1:",
    ]
    assert "  3 loaded: layers.1.up.weight, layers.1.up.bias, layers.1.down.weight" in lines


def test_the_job_of_several_tables_is_written_and_read_back(base, other, tmp_path, catalog):
    job = load_job(job_file(tmp_path, [LOWER, ("other", 'include = ["layers.1.*"]\nstrict = false')]))
    assert parse_job(dump_job(job, catalog), "job.toml", catalog) == job
    assert [table.strict for table in job.checkpoint.load] == [True, False]


def test_a_parameter_that_two_tables_load_is_an_error_that_names_both(base, other, tmp_path):
    job = load_job(job_file(tmp_path, [LOWER, ("other", 'include = ["layers.*"]')]))
    with pytest.raises(CheckpointError) as caught:
        Trainer(job, echo=lambda text: None).run()
    both = "layers.0.up.weight, layers.0.up.bias, layers.0.down.weight"
    expected = f"[checkpoint.load.0] and [checkpoint.load.1] both load {both}; exclude these from one of them"
    assert str(caught.value) == expected


def test_strict_of_a_table_is_about_what_its_own_patterns_name(base, other, tmp_path, train, make_job):
    train(make_job(steps=1, job={"name": "small"}, model=TinyModel(layers=1)))
    job = load_job(job_file(tmp_path, [("small", 'include = ["layers.0.*"]'), ("other", 'exclude = ["layers.0.*"]')]))
    assert Trainer(job, echo=lambda text: None).run().step == 1
    job = load_job(job_file(tmp_path, [("small", 'exclude = ["layers.0.*"]'), ("other", 'include = ["layers.0.*"]')]))
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"small/checkpoints/step-1 lacks .* \[checkpoint.load.0\] selects"):
        Trainer(job, echo=lambda text: None).run()


def test_mistakes_name_their_table(base, other, tmp_path):
    wrong = job_file(tmp_path, [LOWER, ("othre", "")])
    with refuses("checkpoint.load.1.path", "othre'", "'other'") as caught:
        load_job(wrong)
    assert re.search(r"job\.toml:\d+$", caught.value.problems[0].origin)
    job = load_job(job_file(tmp_path, [LOWER, ("other", 'include = ["layer.1.*"]')]))
    with refuses("checkpoint.load.1.include", "'layer.1.*'", "'layers.1.up.bias'"):
        Trainer(job, echo=lambda text: None).run()


# --- the kind ----------------------------------------------------------------------------------------------------


def test_without_this_distribution_a_job_gets_the_line_that_installs_it(base, tmp_path):
    others = [offer for offer in Catalog.installed().offers() if offer.distribution.name != "forge-plugin-checkpoints"]
    with refuses_all(
        at("checkpoint.load.0", "forge-plugin-checkpoints"),
        at("", "pip install forge-plugin-checkpoints"),
    ):
        load_job(job_file(tmp_path, [LOWER]), catalog=Catalog(others))


def test_a_table_saved_before_it_had_a_type_has_not_changed(base, tmp_path, catalog):
    now = dump_job(load_job(job_file(tmp_path, [LOWER])), catalog)
    before = now.replace('type = "forge-plugin-checkpoints/parts"\n', "")
    assert before != now
    assert text_changes(before, now, catalog) == []


@frozen(kw_only=True)
class Zeros(LoadComponent):
    """Weights that are 0."""

    def find(self, job):
        return "found"

    def load(self, found, table, context, model, outline):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.startswith("head"):
                    parameter.zero_()
        return ["head.weight"], [f"{table}: {found}"]


def test_weights_may_come_from_a_component_of_ones_own(base, make_job, train, said, tmp_path):
    kept = Weights()
    train(make_job(steps=1, checkpoint={"load": Zeros()}), kept, echo=said.append)
    assert not kept.first["head.weight"].any()
    assert said[0] == "checkpoint.load: found"
    both = (Parts(path=str(tmp_path / "base")), Zeros())
    with pytest.raises(CheckpointError, match=naming("[checkpoint.load.0]", "[checkpoint.load.1]", "head.weight")):
        train(make_job(steps=1, job={"name": "both"}, checkpoint={"load": both}))
