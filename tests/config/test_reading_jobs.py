"""Layering, overrides, and where each value came from."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from job_parts import AdamW, Cosine, Muon

from forge_core.config.load import load_job
from forge_core.config.tree import Node, Origin, annotate, merge, parse_override, read_job
from forge_core.contracts.errors import Problem
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_testing.refusals import at, check_problems, refuses

Load = Callable[..., Job]
LEAVES = st.dictionaries(st.sampled_from("xyz"), st.integers(), max_size=2)
TREES = st.recursive(
    LEAVES, lambda inner: st.builds(dict.__or__, LEAVES, st.dictionaries(st.sampled_from("ab"), inner)), max_leaves=6
)
"""Trees that agree on which keys are tables (a, b) and which are values (x, y, z)."""


def tree(data: Any, source: str = "job.toml", layer: int = 0) -> Node:
    return annotate(data, {}, Origin(source, 0, layer))


class TestLayers:
    def test_tables_merge_deeply_and_everything_else_replaces(self) -> None:
        base = {"a": {"x": 1, "y": [1, 2], "z": {"deep": 1}}, "b": 1}
        layer = {"a": {"y": [3], "z": {"more": 2}}, "b": {"now": "a table"}}
        expected = {"a": {"x": 1, "y": [3], "z": {"deep": 1, "more": 2}}, "b": {"now": "a table"}}
        assert merge(tree(base), tree(layer)).plain() == expected

    @given(TREES, TREES, TREES)
    def test_layering_is_associative(self, a: Any, b: Any, c: Any) -> None:
        left = merge(merge(tree(a), tree(b)), tree(c))
        right = merge(tree(a), merge(tree(b), tree(c)))
        assert left.plain() == right.plain()

    @given(TREES)
    def test_a_layer_over_itself_changes_nothing(self, a: Any) -> None:
        assert merge(tree(a), tree(a)).plain() == a

    def test_later_files_win_and_overrides_win_over_files(self, write: Callable[..., Path]) -> None:
        files = [write("a = 1\nb = 1\nc = 1", "1.toml"), write("b = 2\nc = 2", "2.toml")]
        root, problems = read_job(files, ["--c=3"])
        assert (root.plain(), problems) == ({"a": 1, "b": 2, "c": 3}, [])


class TestOrigins:
    def test_every_value_knows_its_file_and_line_or_flag(self, write: Callable[..., Path]) -> None:
        files = [write("[t]\na = 1\nb = 1", "1.toml"), write("\n[t]\nb = 2\n[[s]]\nx = 0", "2.toml")]
        root, _ = read_job(files, ["--t.c=3", "--s.0.x=1"])
        origins = {
            path: str(root.innermost(path).origin) for path in ("t.a", "t.b", "t.c", "s.0", "s.0.x", "", "nowhere")
        }
        assert origins == {
            "t.a": "1.toml:2",
            "t.b": "2.toml:3",
            "t.c": "--t.c=3",
            "s.0": "2.toml:4",
            "s.0.x": "--s.0.x=1",
            "": "1.toml + 2.toml",
            "nowhere": "1.toml + 2.toml",
        }

    def test_a_key_that_is_not_there_takes_the_origin_of_its_table(self) -> None:
        root = annotate({"t": {"a": 1}}, {("t",): 4}, Origin("job.toml"))
        assert str(root.innermost("t.missing.key").origin) == "job.toml:4"

    def test_keys_with_dots_are_found(self) -> None:
        root = annotate({"t": {"a.b": {"c": 1}}}, {("t", "a.b", "c"): 7}, Origin("job.toml"))
        assert str(root.innermost("t.a.b.c").origin) == "job.toml:7"


class TestOverrides:
    @pytest.mark.parametrize(
        ("text", "path", "value"),
        [
            ("--a.b=1", ["a", "b"], 1),
            ("--a=1e-3", ["a"], 1e-3),
            ("--a=true", ["a"], True),
            ("--a=bf16", ["a"], "bf16"),
            ("--a=", ["a"], ""),
            ("--a=x=y", ["a"], "x=y"),
            ("--a='2'", ["a"], "2"),
            ("--a=[1, 2]", ["a"], [1, 2]),
            ('--a={type = "adamw", lr = 1e-3}', ["a"], {"type": "adamw", "lr": 1e-3}),
            ("--a.0.b=1", ["a", "0", "b"], 1),
            ('--a."b.c"=1', ["a", "b.c"], 1),
            ("--a=1\nb = 2", ["a"], "1\nb = 2"),
            ("a.b=1", ["a", "b"], 1),
        ],
    )
    def test_values_are_toml_or_else_bare_strings(self, text: str, path: list[str], value: Any) -> None:
        assert parse_override(text) == (path, value)

    @given(st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.lists(st.integers())))
    def test_whatever_toml_can_write_an_override_can_give(self, value: Any) -> None:
        written = tomli_w.dumps({"v": value}).removeprefix("v = ").strip()
        assert parse_override(f"--v={written}") == (["v"], value)

    def test_they_reach_into_arrays_and_create_tables(self, load: Load) -> None:
        job = load("", "--data.sources.0.weight=2", "--loggers.tensorboard.tags.mood=good", "--train.steps=7")
        assert job.data.sources[0].weight == 2.0
        assert job.loggers["tensorboard"].tags == {"mood": "good"}  # type: ignore[attr-defined]
        assert job.train.steps == 7

    def test_a_whole_table_replaces_what_was_there(self, load: Load) -> None:
        assert load("", '--optimizer={type = "adamw"}').optimizer == AdamW()

    def test_later_ones_see_earlier_ones(self, load: Load) -> None:
        assert load("", '--optimizer={type = "muon"}', "--optimizer.lr=0.5").optimizer == Muon(lr=0.5)

    def test_the_last_of_two_for_one_key_wins(self, load: Load) -> None:
        assert load("", "--train.steps=3", "--train.steps=4").train.steps == 4

    def test_long_flags_are_shortened_in_messages(self, problems: Callable[..., list[Problem]]) -> None:
        refusals = problems("", f'--job.name="{"x" * 100}/"')
        check_problems(refusals, at("job.name", origin="--job.name=" + '"' + "x" * 47 + "…"))

    def test_corrections_can_be_pasted_into_a_shell(self, problems: Callable[..., list[Problem]], load: Load) -> None:
        [problem] = problems("", "--job.name=2024")
        [flag] = shlex.split(problem.message.rpartition("write ")[2])
        assert load("", flag).job.name == "2024"


class TestFiles:
    def test_crlf_and_a_byte_order_mark_are_read(self, write: Callable[..., Path]) -> None:
        Path("job.toml").write_bytes(b"\xef\xbb\xbf[a]\r\nb = '''\r\nx'''\r\nc = 1\r\n")
        root, _ = read_job(["job.toml"])
        assert root.plain() == {"a": {"b": "x", "c": 1}}
        assert str(root.innermost("a.c").origin) == "job.toml:4"

    def test_bytes_that_are_not_utf8_are_named(self, write: Callable[..., Path]) -> None:
        Path("job.toml").write_bytes(b"a = '\xff'")
        with refuses("", "UTF-8", "0xff", 5, origin="job.toml"):
            read_job(["job.toml"])

    def test_syntax_errors_at_the_end_of_a_file_have_a_position(self, write: Callable[..., Path]) -> None:
        write('a = """\nnever closed')
        with refuses("", "TOML", origin="job.toml:2:13"):
            read_job(["job.toml"])

    def test_dates_are_no_reason_to_fail(self, write: Callable[..., Path]) -> None:
        root, _ = read_job([write("a = 1979-05-27")])
        assert root.plain() == tomllib.loads("a = 1979-05-27")

    def test_without_files_the_job_comes_from_overrides_alone(self, small_catalog: Catalog) -> None:
        overrides = [
            'model={type = "transformer", dim = 8, layers = 1}',
            "train={steps = 1, global_batch_size = 1, seq_len = 4}",
            "optimizer.type=adamw",
            'data={tokenizer = {type = "bytes"}, sources = [{type = "text", path = "x"}]}',
            'scheduler={type = "cosine"}',
        ]
        job = load_job(overrides=overrides, catalog=small_catalog)
        assert (job.optimizer, job.scheduler) == (AdamW(), Cosine())
