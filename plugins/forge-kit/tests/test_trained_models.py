"""`load_model`: the logits of a run's model from Python, and what it refuses."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.nn import functional as F

from forge_core import Catalog, CheckpointError, ForgeError, Trainer, load_model
from forge_core.plugins.catalog import Distribution, Offer
from forge_testing.refusals import naming, refuses

TEXT = "the cat sat on the mat and the dog sat on the log\n"
JOB = {
    "train": {"steps": 3, "global_batch_size": 4, "seq_len": 8, "device": "cpu"},
    "model": {"type": "transformer", "dim": 16, "layers": 2, "attention": {"heads": 2}},
    "data": {"tokenizer": {"type": "bytes"}},
    "optimizer": {"type": "adamw", "lr": 0.05},
    "eval": {"interval": 3},
}


def trained(folder, **changes):
    """Trains on some files, of which every fourth is held out; returns the summary."""
    for number in range(8):
        (folder / f"{number}.txt").write_text(text_of(number))
    source = {"type": "text", "path": f"{folder}/*.txt", "held_out_every": 4}
    job = {**JOB, "job": {"output": str(folder)}, **changes}
    return Trainer({**job, "data": {**JOB["data"], "sources": [source]}}, echo=lambda text: None).run()


def text_of(number):
    return TEXT[number:] * (number + 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("trained")).folder


@pytest.fixture(scope="module")
def model(run):
    return load_model(run, device="cpu")


def test_logits_of_plain_ids_in_any_form(model):
    ids = model.tokenizer.encode("the cat")
    logits = model(ids)
    assert (logits.shape, logits.dtype, logits.requires_grad) == ((len(ids), 257), torch.float32, False)
    assert torch.equal(model(torch.tensor(ids)), logits)
    torch.testing.assert_close(model(torch.tensor([ids, ids], dtype=torch.int32))[1], logits)
    torch.testing.assert_close(model(ids[:3]), logits[:3])  # causal, and positions from 0 on
    assert (model.step, model.job.model.dim, model.model.training) == (3, 16, False)
    assert model.checkpoint.name == "step-3"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"plugins": {"ema": {"decay": 0.5, "warmup": False}}},
        {"optimizer": {"type": "schedule_free_adamw", "lr": 0.05}},
    ],
    ids=["plain", "ema", "schedule-free"],
)
def test_weights_are_those_that_evaluations_use(tmp_path, changes):
    """The loss of the held-out tokens by `model(ids)` and torch's cross-entropy is the one that the run has logged."""
    summary = trained(tmp_path, **changes)
    model = load_model(summary.folder, device="cpu")
    length, tokenizer = model.job.train.seq_len, model.tokenizer
    end = tokenizer.end_of_text
    tokens = [end, *(id_ for number in (0, 4) for id_ in [*tokenizer.encode(text_of(number)), end])]
    windows = [tokens[start : start + length + 1] for start in range(0, len(tokens) - 1, length)]
    losses = [F.cross_entropy(model(w[:-1]), torch.tensor(w[1:]), reduction="none") for w in windows]
    assert len(torch.cat(losses)) == summary.evaluation["eval/tokens"]
    assert float(torch.cat(losses).mean()) == pytest.approx(summary.evaluation["eval/loss"], rel=1e-5)


def test_the_compute_dtype_can_be_another(run):
    ids = [1, 2, 3, 4]
    exact = load_model(run, device="cpu", dtype="fp64")
    assert (exact(ids).dtype, exact.job.train.precision) == (torch.float64, "fp64")
    torch.testing.assert_close(load_model(run, device="cpu")(ids).double(), exact(ids), rtol=1e-5, atol=1e-6)
    rounded = load_model(run, device="cpu", dtype=torch.bfloat16)
    assert (rounded(ids).dtype, rounded.job.train.precision) == (torch.float32, "bf16")
    torch.testing.assert_close(rounded(ids).double(), exact(ids), rtol=0.05, atol=0.05)


def test_a_model_without_a_tokenizer_has_logits_too(make_job, train):
    model = load_model(train(make_job(steps=2)).folder, device="cpu")
    assert model.tokenizer is None
    assert model([[1, 2], [3, 4]]).shape == (2, 2, 32)


def test_a_checkpoint_elsewhere_needs_the_folder_of_its_run(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "moved")
    shutil.move(tmp_path / "moved/checkpoints/step-3", tmp_path / "disk/mirror/step-3")
    shutil.copytree(tmp_path / "moved/tokenizer", tmp_path / "kept/tokenizer")
    manifest = tmp_path / "disk/mirror/step-3/manifest.json"
    manifest.write_text(manifest.read_text().replace(str(run.parent), str(tmp_path / "gone")))
    with pytest.raises(ForgeError, match=naming("disk/mirror/step-3", "tokenizer", "--run", "run=FOLDER")):
        load_model("disk/mirror/step-3", device="cpu")
    assert load_model("disk/mirror/step-3", device="cpu", run="kept").step == 3


@pytest.mark.parametrize(
    ("ids", "facts"),
    [
        ("text", ["model.tokenizer.encode(text)", "str 'text'"]),
        ([0.5], ["torch.float32", "(1,)"]),
        ([], ["(0,)"]),
        ([[1], [1, 2]], ["list [[1], [1, 2]]"]),
        ([[[1]]], ["torch.int64", "(1, 1, 1)"]),
        ([True], ["torch.bool"]),
        ([3, 257], ["token 257", "has 257"]),
        ([[3, -1]], ["token -1", "has 257"]),
    ],
)
def test_what_is_no_ids_gets_a_sentence(model, ids, facts):
    with pytest.raises(ForgeError, match=naming(*facts)):
        model(ids)


def test_wrong_arguments_get_a_sentence(run, tmp_path):
    with refuses("", "bf16, fp32, fp64", "fp8"):
        load_model(run, dtype="fp8")
    with refuses("train.device", '"tpu"'):
        load_model(run, device="tpu")
    with pytest.raises(CheckpointError, match=naming(f"{tmp_path}/nowhere", "run folder")):
        load_model(tmp_path / "nowhere")


class TestMethodsOfCommands:
    def test_a_command_offers_one_by_a_function_beside_it(self, run, catalog, monkeypatch, tmp_path):
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "counting.py").write_text(
            "def command(argv): return 0\ndef of_model(model, extra):\n    return model.step + extra\n"
        )
        offer = Offer("command", "count", "counting:command", Distribution("forge-plugin-counting", "1.0"))
        model = load_model(run, device="cpu", catalog=Catalog([*catalog.offers(), offer]))
        assert model.count(2) == 5
        with pytest.raises(TypeError, match=naming("count()", "'extra'")):
            model.count(extr=2)

    @pytest.mark.parametrize(("name", "facts"), [("genrate", ["'genrate'", "'generate'"]), ("explain", ["'explain'"])])
    def test_another_name_is_an_attribute_error(self, model, name, facts):
        with pytest.raises(AttributeError, match=naming(*facts)):
            getattr(model, name)
        assert not hasattr(model, "_repr_html_")

    def test_the_line_that_installs_it_is_given_where_it_is_missing(self, run, catalog):
        installed = [offer for offer in catalog.offers() if offer.distribution.name != "forge-plugin-generate"]
        model = load_model(run, device="cpu", catalog=Catalog(installed))
        assert model([1]).shape == (1, 257)
        with pytest.raises(AttributeError, match=naming("'generate'", "pip install forge-plugin-generate")):
            model.generate("the")
