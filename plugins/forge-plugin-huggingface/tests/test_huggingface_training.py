"""Training on streams and chats: exact resume, and the same samples on any number of ranks and workers.

The streams are short, so that a few steps go through several epochs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define, frozen

from forge_core.contracts.components import TokenizerComponent, TrainingHook
from forge_core.data.loader import TrainLoader
from forge_core.engine.build import build_context, build_run
from forge_plugin_huggingface import Auto, HuggingFace
from forge_testing import TinyModel
from forge_testing.processes import run_on_ranks
from forge_testing.tiny_model import TinyNetwork

STEPS = 6
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Few:
    """Letters as ids below 31; 31 is end-of-text."""

    vocab_size = 32
    end_of_text = 31

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 31 for letter in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(id_ + 62) for id_ in ids)

    def save(self, folder: Path) -> None: ...

    def fingerprint(self) -> str:
        return "few"


@frozen(kw_only=True)
class FewLetters(TokenizerComponent):
    def build(self, context: Any, documents: Any) -> Few:
        return Few()

    def load(self, context: Any, folder: Path) -> Few:
        return Few()


@define(kw_only=True, slots=False)
class StopAfter(TrainingHook):
    """Asks to stop after a step."""

    step: int

    def on_step_end(self, context: Any) -> None:
        if context.step == self.step:
            context.request_stop("enough")


@frozen(kw_only=True)
class Wide(TinyModel):
    """The tiny model with room for the ids of a real tokenizer."""

    vocabulary: int = 330

    def build(self, context: Any) -> TinyNetwork:
        return TinyNetwork(self.dim, self.layers, self.dropout, self.vocabulary, context.dtype)


@pytest.fixture
def make_stream_job(make_job, write):
    """A job that trains on a stream of three files: keys of the dataset, workers, changes -> it."""

    def make(keys: dict[str, Any], workers: int = 0, **changes: Any) -> Any:
        rows = [[{"text": f"{file}-{row} " * (row % 4)} for row in range(8 + file)] for file in range(3)]
        source = HuggingFace(path=write("jsonl", *rows), streaming=True, held_out_every=6, held_out_documents=4, **keys)
        return make_job(data={"sources": (source,), "tokenizer": FewLetters(), "workers": workers}, **changes)

    return make


@pytest.mark.parametrize(("keys", "workers"), [({}, 2), ({"lanes": 2, "shuffle": 3}, 0)])
def test_a_run_continues_exactly_in_the_middle_of_a_stream(
    make_stream_job, train, lines, tmp_path: Path, keys: dict[str, Any], workers: int
) -> None:
    def job(name: str, loaded_by: int = workers) -> Any:
        return make_stream_job(keys, loaded_by, steps=STEPS, job={"output": str(tmp_path), "name": name})

    whole = lines(train(job("whole")))
    train(job("cut"), StopAfter(step=2))
    train(job("cut", loaded_by=2 - workers), StopAfter(step=4))
    resumed = lines(train(job("cut")))
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]
    assert len(resumed) == STEPS


def inputs_of(job: Any, catalog: Any, folder: Path, steps: int) -> list[torch.Tensor]:
    """What this rank trains on, step by step."""
    run = build_run(job, build_context(job, catalog, folder))
    loader = TrainLoader(job, run.datasets, run.context)
    found = [torch.cat([batch["input_ids"] for batch in loader.next_step()]) for _ in range(steps)]
    loader.close()
    return found


@pytest.mark.parametrize("keys", [{"shuffle": 5}, {"lanes": 2}])
def test_one_rank_and_two_see_the_same_samples(make_stream_job, catalog, tmp_path: Path, keys: dict[str, Any]) -> None:
    job = make_stream_job(keys)
    alone = inputs_of(job, catalog, tmp_path, 5)
    shares = run_on_ranks(2, lambda rank: inputs_of(job, catalog, tmp_path, 5))
    for step in range(5):
        assert torch.equal(torch.cat([share[step] for share in shares]), alone[step])


def test_one_rank_and_two_have_the_same_curve(make_stream_job, train, lines, tmp_path: Path) -> None:
    jobs = [make_stream_job({}, steps=4, job={"output": str(tmp_path), "name": name}) for name in ("one", "two")]
    one = lines(train(jobs[0]))
    run_on_ranks(2, lambda rank: train(jobs[1]) and None)
    two = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in two if "loss" in line]
    assert losses == pytest.approx([line["loss"] for line in one], rel=1e-5)


@pytest.mark.parametrize("streaming", [False, True])
def test_chats_are_trained_on_where_the_assistant_speaks(
    make_job, build, train, lines, write, pretrained, tmp_path: Path, streaming: bool
) -> None:
    chat = [{"role": "user", "content": "hello?"}, {"role": "assistant", "content": "hello world"}]
    folder = write("jsonl", [{"messages": chat} for _ in range(40)])
    source = HuggingFace(path=folder, messages="messages", streaming=streaming)
    data = {"sources": (source,), "tokenizer": Auto(path=pretrained(CHATML))}
    job = make_job(model=Wide(), data=data, steps=20, seq_len=16)
    run = build(job)
    sequence = next(run.datasets[0].read(0, None))[0] if streaming else run.datasets[0][0]
    learned = sequence["labels"][sequence["labels"] >= 0].tolist()
    tokenizer = run.context.tokenizer
    answer = [*tokenizer.encode("hello world"), 2]
    assert learned[: len(answer)] == answer
    assert len(learned) < 16
    found = lines(train(job))
    assert found[-1]["loss"] < found[0]["loss"] / 2
