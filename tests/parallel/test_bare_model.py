"""Whether a job's stages fit its model is known before a rank starts, as far as the model can be built by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import frozen

from forge_core.contracts.components import ModelComponent, ParallelComponent, TokenizerComponent
from forge_core.contracts.errors import JobError, Problem
from forge_testing import TinyModel, job_problems, tiny_job
from forge_testing.refusals import lacks

Problems = Callable[..., list[str]]


@frozen(kw_only=True)
class Looking(ParallelComponent):
    """A stage that tells how many rows the embedding has."""

    def model_problems(self, model, layout):
        yield Problem("", f"saw {model.embedding.weight.shape[0]} rows, {model.embedding.weight.device.type}")


@frozen(kw_only=True)
class Letters(TokenizerComponent):
    """A tokenizer that is never built; `size` is what is known of it."""

    size: int | None = None

    def expected_vocab_size(self):
        return self.size


@frozen(kw_only=True)
class Wants(ModelComponent):
    """A model whose builder asks `wants` of the tokenizer."""

    wants: str

    def build(self, context):
        if context.tokenizer is None:
            raise JobError([Problem("model.wants", "there is no tokenizer")])
        getattr(context.tokenizer, self.wants)
        return TinyModel().build(context)


@frozen(kw_only=True)
class OnDevices(ModelComponent):
    """A model that refuses devices, with a reason for each, and with one that all share."""

    refused: tuple[str, ...]

    def build(self, context):
        if context.device.type in self.refused:
            raise JobError([Problem("model", "has no kernel"), Problem("model", f"no kernel on {context.device.type}")])
        return TinyModel().build(context)


@frozen(kw_only=True)
class Broken(ModelComponent):
    def build(self, context):
        return TinyModel(dim=-1).build(context)


@pytest.fixture
def problems(tmp_path) -> Problems:
    def ask(model: ModelComponent, tokenizer: TokenizerComponent | None = None, **train: Any) -> list[str]:
        data = {"tokenizer": tokenizer} if tokenizer else {}
        job = tiny_job(str(tmp_path), model=model, parallel={"looking": Looking()}, data=data, **train)
        return job_problems(job, ranks=1)

    return ask


def test_stages_see_the_model_without_memory(problems: Problems) -> None:
    assert problems(TinyModel()) == ["parallel.looking: saw 32 rows, meta"]


def test_a_builder_gets_what_is_known_of_the_tokenizer(problems: Problems) -> None:
    assert problems(Wants(wants="vocab_size"), Letters(size=32)) == ["parallel.looking: saw 32 rows, meta"]


@pytest.mark.parametrize("tokenizer", [Letters(), Letters(size=32)])
def test_what_only_the_data_tell_is_left_to_the_run(problems: Problems, tokenizer: TokenizerComponent) -> None:
    assert problems(Wants(wants="pad_id"), tokenizer) == []


def test_a_missing_tokenizer_is_not_left_to_the_run(problems: Problems) -> None:
    assert problems(Wants(wants="vocab_size")) == ["model.wants: there is no tokenizer"]


def test_a_builder_that_fails_is_told(problems: Problems) -> None:
    (told,) = problems(Broken())
    assert told.startswith("model: ")
    assert not lacks(told, "RuntimeError")


def test_one_device_is_enough_where_it_is_chosen_later(problems: Problems) -> None:
    assert problems(OnDevices(refused=("cuda",)), device="auto") == ["parallel.looking: saw 32 rows, meta"]
    assert problems(OnDevices(refused=("cpu",)), device="auto") == ["parallel.looking: saw 32 rows, meta"]
    assert problems(OnDevices(refused=("cuda", "cpu")), device="auto") == ["model: has no kernel"]
    assert problems(OnDevices(refused=("cpu",)), device="cpu") == ["model: has no kernel", "model: no kernel on cpu"]
