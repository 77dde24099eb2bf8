"""`load_model(run).generate(…)`: the texts of `forge-run generate`, from Python."""

from __future__ import annotations

import pytest

from forge_core import ForgeError, Trainer, load_model
from forge_core.cli import main
from forge_testing.refusals import naming

JOB = {
    "train": {"steps": 3, "global_batch_size": 4, "seq_len": 8, "device": "cpu"},
    "model": {"type": "transformer", "dim": 16, "layers": 1, "attention": {"heads": 2}},
    "data": {"tokenizer": {"type": "bytes"}},
    "optimizer": {"type": "adamw", "lr": 0.01},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generating")
    (folder / "text.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 50)
    data = {**JOB["data"], "sources": [{"type": "text", "path": str(folder / "text.txt")}]}
    job = {**JOB, "data": data, "job": {"output": str(folder)}}
    return load_model(Trainer(job, echo=lambda text: None).run().folder, device="cpu")


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.0}, {"temperature": 1.5, "top_k": 5, "top_p": 0.5, "seed": 3}]
)
def test_texts_are_those_of_the_command(model, capfd, options):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    run = str(model.checkpoint.parent.parent)
    assert main(["generate", run, "--device=cpu", "--prompt", "the c", "--max-tokens=12", *flags]) == 0
    assert capfd.readouterr().out == "the c" + model.generate("the c", max_tokens=12, **options) + "\n"


def test_several_prompts_are_a_batch(model):
    greedy = {"max_tokens": 6, "temperature": 0.0}
    each = [model.generate(prompt, **greedy) for prompt in ("the cat", "a", "")]
    assert model.generate(["the cat", "a", ""], **greedy) == each


def test_a_text_ends_at_a_further_stop(model):
    text = model.generate("the", max_tokens=40, seed=5)
    letter = next(letter for letter in text if letter.isascii() and letter.isalpha())
    for stop in (letter, text[4:7]):
        assert model.generate("the", max_tokens=40, seed=5, stop=["never", stop]) == text.partition(stop)[0]


@pytest.mark.parametrize(
    ("error", "facts", "prompt", "options"),
    [
        (ValueError, ["max_tokens", 1, 0], "a", {"max_tokens": 0}),
        (ValueError, ["max_tokens", 1, "'8'"], "a", {"max_tokens": "8"}),
        (TypeError, ["generate()", "'max_new_tokens'", "'max_tokens'"], "a", {"max_new_tokens": 3}),
        (ValueError, ["'temperature'", ">= 0", -1], "a", {"temperature": -1}),
        (TypeError, ["text", 3, "model(ids)"], [3], {}),
        (ForgeError, ["stop", "empty"], "a", {"stop": ["ab", ""]}),
    ],
)
def test_misuse_gets_a_sentence(model, error, facts, prompt, options):
    with pytest.raises(error, match=naming(*facts)):
        model.generate(prompt, **options)


def test_a_model_without_a_tokenizer_is_named(make_job, train):
    model = load_model(train(make_job(steps=1)).folder, device="cpu")
    with pytest.raises(ForgeError, match=naming("tokenizer", "prompts")):
        model.generate("the")


def test_training_goes_on_in_the_process_that_used_a_model(model, tmp_path):
    """Tables of positions are shared by all models of a process, whichever of them they were made for."""
    length = 24  # longer than the job's sequences, so that the table is made by the call
    model(model.tokenizer.encode("the cat sat on the mat and")[:length])
    source = model.job.data.sources[0].path
    train = {**JOB["train"], "seq_len": length}
    data = {**JOB["data"], "sources": [{"type": "text", "path": source}]}
    job = {**JOB, "train": train, "data": data, "job": {"output": str(tmp_path)}}
    assert Trainer(job, echo=lambda text: None).run().step == 3
