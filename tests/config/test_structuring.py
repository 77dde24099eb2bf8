"""From TOML values to typed components: what is accepted, what is refused, and what is filled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
from attrs import field, frozen
from attrs.validators import deep_iterable, gt, in_, instance_of, max_len, min_len, optional
from job_parts import (
    AdamW,
    Console,
    Constant,
    Cosine,
    GradHistogram,
    HeldOut,
    JsonLines,
    Local,
    MoE,
    Muon,
    Rope,
    SwiGLU,
    TopK,
    Transformer,
    make_catalog,
)

from forge_core.config.load import complete, load_job
from forge_core.config.structure import INVALID, structure
from forge_core.config.tree import Origin, annotate
from forge_core.contracts.components import AnyFloat, OptimizerComponent, SchedulerComponent, default_type
from forge_core.contracts.errors import Problem
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog, Distribution, Offer
from forge_testing.catalogs import with_components
from forge_testing.refusals import ExpectedProblem, at, check_problems, refuses_all

Load = Callable[..., Job]
Problems = Callable[..., list[Problem]]


def read(value: Any, type_: Any, catalog: Catalog | None = None) -> Any:
    """The typed value, or the problems with it."""
    found, findings = structure(annotate(value, {}, Origin("")), type_, catalog or make_catalog())
    return found if found is not INVALID else findings.problems


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(StrEnum):
    HIGH = "high"


SCHEDULE = float | SchedulerComponent


class TestTypes:
    @pytest.mark.parametrize(
        ("value", "type_", "result"),
        [
            (3, int, 3),
            (3, float, 3.0),
            (1e-5, float, 1e-5),
            (True, bool, True),
            ("3", str, "3"),
            ("a/b", Path, Path("a/b")),
            ("b", Literal["a", "b"], "b"),
            ("blue", Color, Color.BLUE),
            ("high", Level, Level.HIGH),
            ([1, 2], tuple[int, ...], (1, 2)),
            ([1, "a"], tuple[int, str], (1, "a")),
            ([1], list[int], [1]),
            ([1], Sequence[float], (1.0,)),
            (["a", "a"], frozenset[str], frozenset("a")),
            ({"a": 1}, Mapping[str, float], {"a": 1.0}),
            ({"a": [{"b": 1}]}, Mapping[str, Any], {"a": [{"b": 1}]}),
            (3, int | None, 3),
            (3, int | Literal["auto"], 3),
            ("auto", int | Literal["auto"], "auto"),
            ("a", str | tuple[str, ...], "a"),
            (["a"], str | tuple[str, ...], ("a",)),
            (3, float | int, 3),
            (float("inf"), AnyFloat, AnyFloat("inf")),
            (3, SCHEDULE, 3.0),
            ({"type": "cosine"}, SCHEDULE, Cosine()),
            ({"type": "cosine"}, float | SchedulerComponent | None, Cosine()),
            ([0.1, {"type": "cosine"}], tuple[SCHEDULE, ...], (0.1, Cosine())),
            ({"base": 1}, Rope, Rope(base=1.0)),
        ],
    )
    def test_values_are_read_as_declared(self, value: Any, type_: Any, result: Any) -> None:
        found = read(value, type_)
        assert found == result
        assert type(found) is type(result)

    @pytest.mark.parametrize(
        ("value", "type_", "expected"),
        [
            (True, int, at("", "int", "bool true")),
            (1.0, int, at("", "int", "float 1.0", "write 1")),
            ("1", int, at("", "int", "str '1'", "write 1")),
            (float("inf"), int, at("", "int", "float inf")),
            (True, float, at("", "float", "bool true")),
            ("x", float, at("", "float", "str 'x'")),
            (float("inf"), float, at("", "finite", "inf")),
            (float("nan"), float | None, at("", "finite", "nan")),
            (1 << 63, float, at("", 64, (1 << 63) - 1, 1 << 63)),
            ([0.9, float("-inf")], tuple[float, float], at("1", "finite", "-inf")),
            ({"a": float("inf")}, Mapping[str, float], at("a", "finite", "inf")),
            (1, bool, at("", "bool", "int 1", "write true")),
            ("false", bool, at("", "bool", "str 'false'", "write false")),
            (2, str, at("", "str", "int 2", 'write "2"')),
            (False, str, at("", "str", "bool false", 'write "false"')),
            (2, Path, at("", "path", "int 2")),
            (["a"], str, at("", "str", "array ['a']")),
            ({"a": 1}, str, at("", "str", "a table")),
            ("c", Literal["a", "b"], at("", "'a', 'b'", "str 'c'")),
            (True, Literal[1, 2], at("", "1, 2", "bool true")),
            ("rad", Color, at("", "'red', 'blue'", "str 'rad'")),
            ("hihg", Level, at("", "'high'", "str 'hihg'")),
            ("abc", tuple[str, ...], at("", "array of str", "str 'abc'", 'write ["abc"]')),
            (5, list[int], at("", "array of int", "int 5", "write [5]")),
            ([1], tuple[int, int], at("", 2, "(int, int)", "array [1]")),
            (3, Mapping[str, int], at("", "table", "int 3")),
            ([{"a": 1}], Mapping[str, int], at("", "an array of tables", "write [.NAME]")),
            (1.5, int | Literal["auto"], at("", "int or 'auto'", "float 1.5")),
            ([], SCHEDULE, at("", "float or scheduler table", "array []")),
            ("cosine", SCHEDULE, at("", "float or scheduler table", "str 'cosine'", 'write {type = "cosine"}')),
            ("x", Rope, at("", "table", "str 'x'")),
            ({"type": "cosine"}, float, at("", "float", "a table")),
            ("x" * 99, int, at("", "int", f"str '{'x' * 27}...{'x' * 28}'")),
        ],
        ids=str,
    )
    def test_nothing_is_converted_silently(self, value: Any, type_: Any, expected: ExpectedProblem) -> None:
        check_problems(read(value, type_), expected)

    def test_each_entry_of_an_array_or_table_is_named(self) -> None:
        check_problems(read([1, "a", 2.5], tuple[int, ...]), at("1", "int", "str 'a'"), at("2", "int", "float 2.5"))
        check_problems(read({"x": 1, "y": "a"}, Mapping[str, int]), at("y", "int", "str 'a'"))

    def test_a_type_that_toml_cannot_give_is_the_components_mistake(self) -> None:
        check_problems(read("x", complex), at("", "complex", "TOML", "component"))


@frozen(kw_only=True)
class Checked:
    """Every validator of attrs that a component is likely to use, and one of its own."""

    number: int = field(default=1, validator=gt(0))
    word: str = field(default="a", validator=in_(["a", "b"]))
    words: tuple[str, ...] = field(default=("a",), validator=[min_len(1), max_len(2)])
    maybe: float | None = field(default=None, validator=optional(gt(0)))
    each: tuple[int, ...] = field(default=(), validator=deep_iterable(gt(0)))
    exact: int = field(default=1, validator=instance_of(int))
    low: int = 0
    high: int = field(default=1)

    @high.validator
    def _above_low(self, attribute: Any, value: int) -> None:
        if value <= self.low:
            raise ValueError(f"must be above low, {self.low}")


@frozen(kw_only=True)
class Pair:
    first: int
    second: int = 2

    def __attrs_post_init__(self) -> None:
        if self.first == self.second:
            raise ValueError("first and second must differ")


class TestValidators:
    @pytest.mark.parametrize(
        ("table", "message"),
        [
            ({"number": 0}, "number: must be > 0, got 0"),
            ({"word": "c"}, "word: must be one of 'a', 'b', got 'c'"),
            ({"words": []}, "words: must not be empty, got ()"),
            ({"words": ["a", "b", "c"]}, "words: must be of length 2 or less, got ('a', 'b', 'c')"),
            ({"maybe": -1}, "maybe: must be > 0, got -1.0"),
            ({"each": [1, 0]}, "each: must have every entry be > 0, got (1, 0)"),
            ({"high": 0}, "high: must be above low, 0"),
            ({"low": 5, "high": 5}, "high: must be above low, 5"),
        ],
    )
    def test_their_messages_are_plain(self, table: dict[str, Any], message: str) -> None:
        _, findings = structure(annotate(table, {}, Origin("")), Checked, make_catalog())
        assert [str(problem) for problem in findings.problems] == [message]

    def test_they_run_beside_fields_that_cannot_be_read(self) -> None:
        _, findings = structure(annotate({"number": 0, "word": 3, "low": "x"}, {}, Origin("")), Checked, make_catalog())
        number = at("number", "> 0", "got 0")
        check_problems(findings.problems, at("word", "str", "int 3"), at("low", "int", "str 'x'"), number)

    def test_a_check_of_the_whole_class_is_told_at_its_table(self) -> None:
        assert read({"first": 2}, Pair) == [Problem("", "first and second must differ", id="wrong-value")]

    def test_a_check_of_the_whole_class_is_not_blamed_for_a_default_that_stands_in(self) -> None:
        check_problems(read({"first": 2, "second": "x"}, Pair), at("second", "int", "str 'x'"))


@frozen(kw_only=True)
class Wrapper(OptimizerComponent):
    inner: OptimizerComponent = default_type("wrapper")


@frozen(kw_only=True)
class Hidden(OptimizerComponent):
    tensor: NoSuchType = 0  # type: ignore[name-defined]  # noqa: F821


class Undecorated(AdamW):
    momentum: float = 0.9


def with_optimizers(**classes: type) -> Catalog:
    return with_components(make_catalog(), {"optimizer": classes}, "forge-plugin-mine")


class TestComponents:
    def test_type_selects_the_class_at_any_depth(self, load: Load) -> None:
        job = load('[model.ffn]\ntype = "moe"\nexperts = 4\nrouter = { type = "topk", top_k = 1 }')
        assert job.model == Transformer(dim=64, layers=2, ffn=MoE(experts=4, router=TopK(top_k=1)))

    def test_default_components_are_filled_in_at_any_depth(self, load: Load) -> None:
        job = load('[model.ffn]\ntype = "moe"\nexperts = 4')
        assert job.model.ffn.router == TopK()  # type: ignore[attr-defined]
        assert (job.scheduler, job.checkpoint.storage) == (Constant(), Local())

    def test_a_table_without_type_configures_the_default_component(self, load: Load) -> None:
        job = load("[model.ffn]\nhidden = 7\n[scheduler]\nwarmup_steps = 3\n[checkpoint.storage]\nfolder = 'x'")
        assert job.model.ffn == SwiGLU(hidden=7)  # type: ignore[attr-defined]
        assert (job.scheduler, job.checkpoint.storage) == (Constant(warmup_steps=3), Local(folder=Path("x")))

    def test_names_of_named_tables_are_their_default_type(self, load: Load) -> None:
        job = load('[hooks.grad_histogram]\n[hooks.rare]\ntype = "grad_histogram"\nevery = 1000')
        assert job.hooks == {"grad_histogram": GradHistogram(), "rare": GradHistogram(every=1000)}
        assert list(job.hooks) == ["grad_histogram", "rare"]

    def test_the_cores_own_entries_are_always_there(self, load: Load) -> None:
        job = load("[loggers.console]\nevery = 5\n[loggers.tensorboard]")
        assert job.evaluations == {"held_out": HeldOut()}
        assert (job.loggers["console"], job.loggers["jsonl"]) == (Console(every=5), JsonLines())
        assert set(job.loggers) == {"console", "jsonl", "tensorboard"}

    def test_another_distribution_with_the_types_of_defaults_changes_nothing(self, load: Load) -> None:
        rival = {
            "logger": {"console": JsonLines, "jsonl": Console},
            "scheduler": {"constant": Cosine},
            "ffn": {"swiglu": MoE},
        }
        crowded = with_components(make_catalog(), rival, "forge-plugin-rival")
        alone = load()
        assert load_job("good.toml", catalog=crowded) == alone

    def test_defaults_that_contain_themselves_are_refused(self) -> None:
        [problem] = read({"type": "wrapper"}, OptimizerComponent, with_optimizers(wrapper=Wrapper))
        assert set(problem.path.split(".")) == {"inner"}

    def test_field_types_that_do_not_exist_at_run_time_are_told(self) -> None:
        refusals = read({"type": "hidden"}, OptimizerComponent, with_optimizers(hidden=Hidden))
        check_problems(refusals, at("", "Hidden", "'NoSuchType'"))

    def test_a_subclass_without_decorator_is_refused(self) -> None:
        refusals = read({"type": "bare"}, OptimizerComponent, with_optimizers(bare=Undecorated))
        check_problems(refusals, at("type", "'bare'", "forge-plugin-mine 0", "@attrs.frozen(kw_only=True)"))

    def test_a_default_that_is_not_installed_is_told_at_its_key(self) -> None:
        offers = [offer for offer in make_catalog().offers() if offer.type != "topk"]
        refusals = read({"type": "moe", "experts": 2}, component("ffn"), Catalog(offers))
        check_problems(refusals, at("router", "'topk'", "Installed: none"))

    def test_two_owners_of_a_kind_are_an_error_where_the_kind_is_used(self) -> None:
        second = Offer("kind", "ffn", "other:FFN", Distribution("forge-plugin-other", "0.3.0"))
        catalog = Catalog([*make_catalog().offers(), second])
        assert read({"type": "adamw"}, OptimizerComponent, catalog) == AdamW()
        refusals = read({"type": "swiglu"}, component("ffn"), catalog)
        check_problems(refusals, at("type", "'ffn'", "forge-plugin-other 0.3.0", "forge-plugin-transformer 0.2.0"))

    def test_a_mistake_in_one_component_hides_no_other(self, problems: Problems) -> None:
        refusals = problems(
            '[optimizer]\ntype = "sophia"\n[model]\nheads = 0\n[scheduler]\ntype = "cosine"\nfinal = -1'
        )
        check_problems(refusals, "optimizer.type", "model.heads", "scheduler.final")


def component(kind: str) -> type:
    return make_catalog().kind_base(kind)


class TestJobsMadeInPython:
    def test_defaults_and_the_cores_own_entries_are_filled_in(self, load: Load, small_catalog: Catalog) -> None:
        loaded = load()
        bare = attrs.evolve(
            loaded,
            model=Transformer(dim=64, layers=2),
            scheduler=attrs.fields_dict(Job)["scheduler"].default,
            checkpoint=attrs.fields_dict(Job)["checkpoint"].default,
            loggers={},
            evaluations={},
        )
        assert complete(bare, small_catalog) == loaded

    def test_what_was_made_in_python_is_kept(self, load: Load, small_catalog: Catalog) -> None:
        hook = GradHistogram()
        hook.seen = 3
        job = complete(attrs.evolve(load(), hooks={"mine": hook}, optimizer=Muon(lr=0.5)), small_catalog)
        assert job.hooks["mine"] is hook
        assert job.optimizer == Muon(lr=0.5)

    def test_defaults_that_are_not_installed_are_all_told(self, load: Load) -> None:
        bare = attrs.evolve(load(), model=Transformer(dim=64, layers=2), loggers={})
        with refuses_all("model.ffn", "loggers.console", "loggers.jsonl"):
            complete(bare, Catalog([]))
