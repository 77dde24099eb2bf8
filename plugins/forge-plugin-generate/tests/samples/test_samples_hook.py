"""Samples: what they are, when they come, and that training does not notice."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from attrs import define, field, frozen

from forge_core.contracts.components import ParallelComponent, TokenizerComponent, TrainingHook
from forge_core.contracts.contexts import TrainContext
from forge_core.contracts.layout import Layout
from forge_core.contracts.runtime import ParallelStage
from forge_core.engine.evaluation import evaluation_mode
from forge_core.engine.trainer import Trainer
from forge_kit.tools.sampled_texts import SampledText, SampledTexts, last_samples, visible
from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_generate.samples import Samples
from forge_plugin_generate.samples.output import show
from forge_plugin_text import Bytes
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, TinyModel, tiny_job
from forge_testing.catalogs import installed
from forge_testing.laws import Case, layout_law
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks, refuses
from forge_testing.tiny_model import TinyNetwork

ALPHABET = "\0abcdefghijklmnopqrstuvwxyz[]/ .\n"


@frozen
class Letters:
    """See `forge_core.contracts.data.Tokenizer`."""

    vocab_size: ClassVar[int] = 32
    end_of_text: ClassVar[int] = 0

    def encode(self, text):
        return [ALPHABET.index(char) for char in text]

    def decode(self, ids):
        return "".join(ALPHABET[i] for i in ids)

    def save(self, folder):
        pass

    def fingerprint(self):
        return ALPHABET


@frozen(kw_only=True)
class LettersComponent(TokenizerComponent):
    def build(self, context, documents):
        return Letters()

    def load(self, context, folder):
        return Letters()


class Writer(TinyNetwork):
    """Every position stands for itself, so decoding needs no cache."""

    def new_cache(self, batch_size, length):
        return None

    def decode(self, batch, cache):
        return self(batch)


@frozen(kw_only=True)
class WriterModel(TinyModel):
    def build(self, context):
        return Writer(self.dim, self.layers, self.dropout, 32, context.dtype)


@pytest.fixture
def make_writer_job(make_job):
    """A job whose model has dropout and can write."""

    def make(*hooks, **changes):
        data = {"sources": (Numbers(),), "tokenizer": LettersComponent()}
        named = {f"samples{number}": hook for number, hook in enumerate(hooks)}
        return make_job(**{"model": WriterModel(dropout=0.5), "data": data, "hooks": named} | changes)

    return make


def kept(folder):
    """{step: what is in the file}, in order."""
    sections = (folder / "samples.txt").read_text().split("=== step ")[1:]
    return [(int(head), body.rstrip("\n")) for head, _, body in (section.partition(" ===\n") for section in sections)]


# --- training does not notice --------------------------------------------------------------------------------------


def test_the_curve_is_the_same_to_the_bit_with_and_without_samples(make_writer_job, train, lines):
    keys = {"eval": {"interval": 1}}
    without = lines(train(make_writer_job(job={"name": "without"}, **keys)))
    with_samples = lines(train(make_writer_job(Samples(every_eval=True), job={"name": "with"}, **keys)))
    for name in ("loss", "grad_norm"):
        assert [record[name] for record in with_samples] == [record[name] for record in without]


# --- what and when -------------------------------------------------------------------------------------------------


@define(kw_only=True, slots=False)
class Expects(TrainingHook):
    """Generates what the hook under test should show."""

    texts: list[str] = field(init=False, factory=list)

    def on_train_end(self, context):
        with evaluation_mode(context.model, context.optimizer):
            rows = generate(context.model, [[3], [0]], 9, 0, Sampling(temperature=0.5, top_k=7, top_p=0.9), seed=5)
        self.texts = [Letters().decode(row) for row in rows]


def test_it_shows_and_keeps_what_the_trained_model_generates(make_writer_job, train, capsys):
    settings = {"max_tokens": 9, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": 5}
    expects = Expects()
    folder = train(make_writer_job(Samples(prompts=("c", ""), **settings)), expects).folder
    first, second = expects.texts
    assert kept(folder) == [(4, f"c{visible(first)}\n{'-' * 40}\n{visible(second)}".rstrip("\n"))]
    texts = (SampledText(prompt="c", text=first), SampledText(prompt="", text=second))
    assert last_samples(folder, 2) == [SampledTexts(step=4, texts=texts)]
    shown = capsys.readouterr().out
    assert not lacks(shown, "step 4")
    assert "c" + visible(first).expandtabs() in shown


@pytest.mark.parametrize(("every_eval", "steps"), [(False, [5]), (True, [2, 4, 5])])
def test_it_samples_at_the_end_or_after_each_evaluation_and_never_twice_at_a_step(
    make_writer_job, train, every_eval, steps
):
    job = make_writer_job(Samples(every_eval=every_eval, max_tokens=3), eval={"interval": 2}, steps=5)
    assert [step for step, _ in kept(train(job).folder)] == steps


@define(kw_only=True, slots=False)
class Stops(TrainingHook):
    final: bool = False

    def on_step_end(self, context):
        if context.step == 3:
            context.request_stop("enough", final=self.final)


@pytest.mark.parametrize(("final", "steps"), [(True, [2, 3]), (False, [2])])
def test_a_run_that_stops_samples_if_it_is_over_and_leaves_at_once_if_it_is_to_be_continued(
    make_writer_job, train, final, steps
):
    job = make_writer_job(Samples(every_eval=True, max_tokens=3), eval={"interval": 2})
    assert [step for step, _ in kept(train(job, Stops(final=final)).folder)] == steps


def test_a_finished_run_shows_its_samples_again(make_writer_job, train):
    def job():
        return make_writer_job(Samples(every_eval=True, max_tokens=3))

    train(job())
    first, again = kept(train(job()).folder)
    assert first == again


def test_on_several_ranks_the_first_samples(make_writer_job, train, tmp_path):
    def rank(number):
        train(make_writer_job(Samples(max_tokens=3)))

    run_on_ranks(2, rank)
    assert [step for step, _ in kept(tmp_path / "run")] == [4]


# --- what is refused -----------------------------------------------------------------------------------------------


def problems(job, layout=None):
    return [str(problem) for problem in Samples().problems(job, layout or Layout())]


def test_a_job_without_a_tokenizer_is_a_problem(make_job, make_writer_job):
    message = "sampling text needs a tokenizer; add [data.tokenizer], or leave the hook out"
    assert problems(make_job()) == [message]
    assert problems(make_writer_job()) == []


@frozen(kw_only=True)
class Splits(ParallelComponent):
    """A stage of a third party that says nothing of generation."""

    def degrees(self):
        return {"shard": 2}

    def build(self, context):
        return ParallelStage()


def test_a_layout_whose_stage_says_nothing_of_generation_is_refused(make_writer_job, train):
    def rank(number):
        with refuses("", "shard 2", "forge-run generate"):
            train(make_writer_job(Samples(), parallel={"splits": Splits()}))

    run_on_ranks(2, rank)


def written(folder, layout):
    """The samples of a run."""
    model = Transformer(dim=16, layers=2, attention=GroupedQueryAttention(heads=2), init_std=0.5, vocab_size=258)
    data = {"sources": (Numbers(),), "tokenizer": Bytes()}
    hook = Samples(every_eval=True, prompts=("some", "a longer text"), max_tokens=12, temperature=1.0)
    changes = {"model": model, "data": data, "hooks": {"samples": hook}, "precision": "fp64", "eval": {"interval": 2}}
    job = tiny_job(str(folder), installed(), **changes, global_batch_size=8, gc_interval=0, **layout)
    return kept(Trainer(job, catalog=installed(), echo=lambda text: None).run().folder)


def the_same(ranks, alone):
    assert ranks == [alone] * len(ranks)
    assert len(set(alone)) == 2


test_layouts = layout_law(Case("samples", observe=written, compare=the_same, layouts=("pp2", "cp2")))


@define(kw_only=True, slots=False)
class Steps(TrainingHook):
    count: int = field(init=False, default=0)

    def on_step_begin(self, context):
        self.count += 1


def test_a_model_that_cannot_generate_is_refused_before_the_first_step(make_writer_job, train):
    steps = Steps()
    with refuses("model", "TinyNetwork", "new_cache and decode"):
        train(make_writer_job(Samples(), model=TinyModel()), steps)
    assert steps.count == 0


def test_a_model_with_too_few_positions_is_refused_before_the_first_step(make_writer_job, train):
    steps, model = Steps(), Transformer(vocab_size=32, dim=16, layers=1, learned_positions=64)
    with refuses("max_tokens", "123 positions", "model.learned_positions = 64"):
        train(make_writer_job(Samples(prompts=("abc",)), model=model), steps)
    assert steps.count == 0


def test_a_hook_given_from_python_is_checked_too(make_job, train):
    with refuses("", "[data.tokenizer]"):
        train(make_job(model=WriterModel()), Samples())


# --- text is text --------------------------------------------------------------------------------------------------


def one(prompt, text):
    return SampledTexts(step=1, texts=(SampledText(prompt=prompt, text=text),))


def test_nothing_in_a_text_is_interpreted(capsys):
    show(one("[bold]", "[red]a[/] :smile: \x1b[31m\r\b\ud800 end"))
    assert "[bold][red]a[/] :smile: \\x1b[31m\\r\\x08\\ud800 end\n" in capsys.readouterr().out


def test_long_lines_stay_whole(capsys):
    show(one("", "word " * 100 + "end"))
    assert "word " * 100 + "end\n" in capsys.readouterr().out


def test_a_terminal_that_lacks_a_character_gets_an_escape(monkeypatch):
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    show(one("", "a→b"))
    assert b"a\\u2192b\n" in buffer.getvalue()


class Proxy(io.StringIO):
    """As rich puts it in the place of standard output while a progress line is live."""

    rich_proxied_file = io.StringIO()


def test_what_is_shown_goes_past_a_live_progress_line(monkeypatch):
    proxy = Proxy()
    monkeypatch.setattr(sys, "stdout", proxy)
    show(one("", "text"))
    assert "text\n" in proxy.getvalue()
    assert proxy.rich_proxied_file.getvalue() == ""


def test_importing_the_plugin_imports_no_torch():
    code = "import sys, forge_plugin_generate.samples; sys.exit(bool({'torch', 'rich'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sampling_leaves_the_generator_of_torch_alone(make_writer_job, build):
    run = build(job := make_writer_job())
    trained = {"model": run.model, "optimizer": run.optimizer, "tokenizer": Letters()}
    context = TrainContext(job=job, **trained, folder=None, step=1)
    before = torch.get_rng_state()
    Samples(max_tokens=5).on_train_end(context)
    assert torch.equal(torch.get_rng_state(), before)


# --- how texts begin and end ---------------------------------------------------------------------------------------


@frozen
class BeginningLetters(Letters):
    begin_of_text: ClassVar[tuple[int, ...]] = (7,)

    def stop_ids(self):
        return [0, 20]


@frozen(kw_only=True)
class BeginningLettersComponent(LettersComponent):
    def build(self, context, documents):
        return BeginningLetters()


def test_texts_begin_and_end_as_the_tokenizer_says_and_at_further_tokens(make_writer_job, train):
    expected = []

    @define(kw_only=True, slots=False)
    class Writes(TrainingHook):
        def on_train_end(self, context):
            with evaluation_mode(context.model, context.optimizer):
                prompts, stop = [[7, 3], [7]], [20, Letters().encode("e")[0]]
                rows = generate(context.model, prompts, 60, 0, Sampling(temperature=0.9, top_p=0.95), stop=stop, seed=1)
            expected.extend(Letters().decode(row) for row in rows)

    data = {"sources": (Numbers(),), "tokenizer": BeginningLettersComponent()}
    hook = Samples(prompts=("c", ""), max_tokens=60, temperature=0.9, seed=1, stop=("e",))
    folder = train(make_writer_job(hook, data=data), Writes()).folder
    texts = "\n".join([f"c{visible(expected[0])}", "-" * 40, visible(expected[1])])
    assert kept(folder) == [(4, texts.rstrip("\n"))]
    assert not any("e" in text or ALPHABET[20] in text for text in expected)


def test_a_text_of_several_tokens_ends_a_text(make_writer_job, train):
    def text(stop):
        hook = Samples(prompts=("c",), max_tokens=60, stop=stop)
        return kept(train(make_writer_job(hook)).folder)[-1][1]

    plain = text(())
    assert len(plain) > 3
    assert text(("never", plain[2:4])) == plain[:2]


def test_an_empty_stop_is_refused_before_the_first_step(make_writer_job, train):
    with refuses("stop", "empty"):
        train(make_writer_job(Samples(stop=("",))))
