"""The rule by which sizes are chosen: against built models, published figures, and its own promises."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_core.contracts.layout import Layout
from forge_core.engine.build import build_bare_model
from forge_core.parallel.initialise import bare_context
from forge_core.plugins.catalog import Catalog
from forge_plugin_plan.init import sizes
from forge_plugin_plan.init.corpora import Corpus, own_text
from forge_plugin_plan.init.job_text import Draft, render
from forge_plugin_plan.init.sizes import Budget, Data, Machine, choose, parameters, plan, vocabulary_for
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import tiny_job
from forge_testing.refusals import lacks, refuses


@pytest.mark.parametrize(("layers", "vocab_size"), [(2, 512), (3, 1000), (12, 32768)])
def test_parameters_are_those_of_the_built_model(layers: int, vocab_size: int) -> None:
    attention = GroupedQueryAttention(heads=layers, qk_norm=True)
    component = Transformer(
        dim=64 * layers, layers=layers, vocab_size=vocab_size, tie_embeddings=True, attention=attention
    )
    job, catalog = tiny_job("runs", model=component), Catalog.installed()
    _, outline = build_bare_model(job, bare_context(job, Layout(), catalog, torch.device("cpu")))
    assert sum(outline.sizes.values()) == parameters(layers, vocab_size)


def machine(flops: float, memory: int | None = None) -> Machine:
    return Machine(name="a machine", flops=flops, precision="bf16", memory=memory)


def test_batch_and_rate_are_those_of_the_step_law() -> None:
    # By logarithms: ln(0.58 D^0.571) and ln(1.79 N^-0.713 D^0.307) of a billion parameters and 100 billion tokens.
    assert math.log(sizes.batch_for(1e11)) == pytest.approx(math.log(0.58) + 0.571 * 11 * math.log(10))
    assert sizes.rate(10**9, 10**11) == float(f"{1.79 * 10 ** (-0.713 * 9 + 0.307 * 11):.1e}") == 1.6e-3
    assert sizes.rate(1000, 10**9) == sizes.MOST_RATE


budgets = st.builds(Budget, seconds=st.floats(60, 1e6))
speeds = st.floats(1e9, 1e16)
amounts = st.integers(10_000, 10**12)


@given(budget=budgets, flops=speeds, tokens=amounts, vocab_size=st.sampled_from([512, 4096, 32768]))
def test_promises_of_the_rule(budget: Budget, flops: float, tokens: int, vocab_size: int) -> None:
    found = choose(budget, machine(flops), Data(tokens=tokens, vocab_size=vocab_size))
    assert budget.seconds is not None
    assert found.epochs is not None
    batch_tokens = found.global_batch_size * found.seq_len
    least = sizes.LEAST_STEPS * batch_tokens
    assert found.tokens == least or found.seconds <= budget.seconds + 1.01 * found.seconds / found.steps
    assert found.tokens == least or found.epochs <= sizes.MOST_EPOCHS + batch_tokens / tokens
    assert 4 * batch_tokens <= tokens
    if found.layers > sizes.LEAST_LAYERS:
        assert found.tokens >= 0.95 * sizes.TOKENS_PER_PARAMETER * found.parameters
        assert sizes.TOKENS_PER_PARAMETER * found.parameters <= sizes.WORTH_EPOCHS * tokens


@given(flops=speeds, tokens=amounts, factor=st.floats(1, 100))
def test_more_time_or_data_never_give_a_smaller_model(flops: float, tokens: int, factor: float) -> None:
    def layers(seconds: float, amount: int) -> int:
        return choose(Budget(seconds=seconds), machine(flops), Data(tokens=amount, vocab_size=4096)).layers

    assert layers(600 * factor, tokens) >= layers(600, tokens)
    assert layers(600, round(tokens * factor)) >= layers(600, tokens)


def test_a_number_of_parameters_is_met_by_the_nearest_model() -> None:
    found = choose(Budget(parameters=124_000_000), machine(4e14), Data(tokens=None, vocab_size=32768))
    others = [parameters(layers, 32768) for layers in (found.layers - 1, found.layers + 1)]
    assert others[0] < 124_000_000 < others[1]
    assert found.tokens == pytest.approx(20 * found.parameters, rel=0.01)
    assert found.epochs is None


def test_what_does_not_fit_into_memory_is_divided_or_refused() -> None:
    budget, data = Budget(parameters=124_000_000), Data(tokens=None, vocab_size=32768)
    whole = choose(budget, machine(4e14, 10**12), data)
    assert whole.micro_batch_size == 0
    divided = choose(budget, machine(4e14, 8 * 10**9), data)
    assert 0 < divided.micro_batch_size < divided.global_batch_size
    assert divided.global_batch_size % divided.micro_batch_size == 0
    assert (divided.steps, divided.global_batch_size) == (whole.steps, whole.global_batch_size)
    with refuses("", "138 M", "2.2 GB", "1.0 GB", "--parameters", "[parallel.fsdp]"):
        choose(budget, machine(4e14, 10**9), data)
    in_time = choose(Budget(seconds=1e6), machine(4e14, 10**9), data)  # the time would allow a larger one
    assert in_time.parameters * sizes.STATE_BYTES < 0.8e9


def test_data_that_are_too_few_are_refused() -> None:
    with refuses("", "900 tokens", "1,024"):
        choose(Budget(seconds=60), machine(1e11), Data(tokens=900, vocab_size=512))


def test_vocabularies_grow_with_the_text_and_stay_a_part_of_the_model() -> None:
    large = Budget(parameters=10**9)
    found = [vocabulary_for(10**power, large, machine(1e12)) for power in (5, 7, 9, 12)]
    assert found == [512, 4096, 32768, 32768]
    small = vocabulary_for(10**9, Budget(parameters=10**6), machine(1e12))
    assert small < 4096


def test_tuning_takes_three_epochs_or_the_time() -> None:
    data, model = Data(tokens=1_000_000, vocab_size=50_000), (10**8, 12, 768)
    by_data = plan(*model, Budget(), machine(1e13), data, seq_len=1024, wanted=3e6)
    assert by_data.epochs == pytest.approx(3, rel=0.05)
    assert by_data.lr == sizes.TUNING_RATE
    by_time = plan(*model, Budget(seconds=100), machine(1e13), data, seq_len=1024, wanted=3e6)
    assert by_time.seconds == pytest.approx(100, rel=0.1)
    assert by_time.tokens < by_data.tokens


@pytest.mark.parametrize(
    ("text_bytes", "seconds", "reason"),
    [(13_900_000, 60, ["4,096", "embeddings"]), (13_900_000, 10**6, ["4,096", "10 MB", "doubled"])],
)
def test_the_job_says_which_bound_its_vocabulary_comes_from(text_bytes: int, seconds: float, reason: list[str]) -> None:
    budget, corpus = Budget(seconds=seconds), Corpus(source=[], text_bytes=text_bytes)
    vocab_size = vocabulary_for(text_bytes, budget, machine(1e11))
    sizes = choose(budget, machine(1e11), Data(tokens=None, vocab_size=vocab_size))
    draft = Draft(name="run", corpus=corpus, vocab_size=vocab_size, machine=machine(1e11), budget=budget, sizes=sizes)
    [line] = [line for line in render(draft, "job.toml").splitlines() if line.startswith("# tokens:")]
    assert not lacks(line, *reason)
    assert not lacks(render(draft, "job.toml"), f"{sizes.layers} layers", f"dim {sizes.dim}")


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n", "Format:"),
        ("a line\nIt was the best of times, it was the worst", "It was the best of"),
        ("あ" * 80, "あ" * 60),
    ],
)
def test_a_prompt_ends_at_a_word(text: str, prompt: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert own_text([str(tmp_path / "a.txt")], "text").prompt == prompt


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999"), (1_000, "1 k"), (1_234_567, "1.23 M"), (1e9, "1 G"), (2e12, "2 T")]
)
def test_amounts_are_told_in_the_largest_unit_that_is_not_more(count, text):
    assert sizes.amount(count) == text
