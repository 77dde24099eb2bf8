"""What is known of keys: documentation from source, demands of validators, JSON Schema."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from attrs import field, frozen
from attrs.validators import ge, gt, in_, lt, matches_re, min_len, optional
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from job_parts import MoE, Text, Transformer, make_catalog
from job_strategies import tables

from forge_core.cli import command_summary
from forge_core.config.keys import demands
from forge_core.config.load import dump_job
from forge_core.contracts.components import OptimizerComponent, SchedulerComponent
from forge_core.job import (
    CheckpointSection,
    DataSection,
    EvalSection,
    Job,
    JobSection,
    MetricsSection,
    TrainSection,
)
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.documented_keys import class_doc, field_docs, keys_of, one_paragraph
from forge_plugin_author.schema import job_schema

Validator = jsonschema.Draft202012Validator
SECTIONS = [JobSection, TrainSection, DataSection, CheckpointSection, EvalSection, MetricsSection]
CATALOG = make_catalog()
USABLE = Catalog([o for o in CATALOG.offers() if o.type not in ("sophia", "odd", "soap", "clumsy")])


@frozen(kw_only=True)
class Base(OptimizerComponent):
    lr: float = 0.1
    """Of the
    base."""
    momentum: float = 0.9
    """Stays."""


@frozen(kw_only=True)
class Derived(Base):
    lr: float = 0.2
    """Of the derived."""
    steps: tuple[int, ...] = (1, 2)
    note: str | None = None
    schedule: float | SchedulerComponent = 1.0
    names: Mapping[str, Literal["a", "b"]] = field(factory=dict)
    required: int = field()


class TestDocs:
    def test_string_literals_under_fields_document_them(self) -> None:
        assert field_docs(Transformer)["heads"] == "Attention heads; must divide `dim`."
        assert "layers" not in field_docs(Transformer)

    def test_inherited_fields_keep_their_documentation_unless_overridden(self) -> None:
        assert {name: field_docs(Derived)[name] for name in ("lr", "momentum")} == {
            "lr": "Of the derived.",
            "momentum": "Stays.",
        }
        assert field_docs(Text)["weight"].startswith("Share of the training sequences")

    @pytest.mark.parametrize(
        "section", [JobSection, TrainSection, DataSection, CheckpointSection, EvalSection, MetricsSection]
    )
    def test_every_key_of_the_cores_sections_is_documented(self, section: type) -> None:
        assert [key.name for key in keys_of(section) if not key.doc] == []

    def test_a_class_without_source_has_no_documentation(self) -> None:
        made: Any = {}
        exec("from attrs import frozen\n@frozen\nclass Made:\n    x: int = 1\n    '''Doc.'''\n", made)
        assert field_docs(made["Made"]) == {}

    def test_function_summaries_are_read_without_importing(self) -> None:
        heading, summary, _ = command_summary("forge_kit.tools.check:command")
        assert heading == "start"
        assert summary.startswith("Check a job")
        assert command_summary("forge_kit.tools.check:nothing") == ("start", "", "")
        assert command_summary("forge_core.no_such_module:command") == ("", "", "")
        assert command_summary("no_such_package.a.b:command") == ("", "", "")

    def test_the_first_paragraph_is_put_on_one_line(self) -> None:
        assert one_paragraph("a\n b\n\nc") == "a b"
        assert class_doc(MoE) == "Mixture of experts."


class TestKeys:
    def test_defaults_are_written_as_in_toml(self) -> None:
        texts = {key.name: key.default_text for key in keys_of(Derived)}
        assert texts == {
            "lr": "0.2",
            "steps": "[1, 2]",
            "note": "",
            "schedule": "1.0",
            "names": "{}",
            "required": "",
            "momentum": "0.9",
            "groups": "[]",
        }
        assert [key.name for key in keys_of(Derived) if key.required] == ["required"]
        assert {key.name: key.default_text for key in keys_of(MoE)}["router"] == 'type = "topk"'

    @pytest.mark.parametrize(
        ("validator", "texts"),
        [
            (gt(0), ["be > 0"]),
            ([ge(0), lt(1)], ["be >= 0", "be < 1"]),
            (in_(["a", "b"]), ["be one of 'a', 'b'"]),
            (matches_re("[a-z]+"), ["match '[a-z]+'"]),
            (min_len(1), ["not be empty"]),
            (min_len(3), ["be of length 3 or more"]),
            (optional(gt(0)), ["be > 0"]),
            (lambda *_: None, [""]),
            (None, []),
        ],
    )
    def test_demands_of_validators_are_put_into_words(self, validator: Any, texts: list[str]) -> None:
        @frozen
        class One:
            x: Any = field(default=None, validator=validator)

        assert [demand.text for demand in demands(One.__attrs_attrs__.x.validator)] == texts  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def validator() -> Validator:
    schema, _ = job_schema(CATALOG)
    Validator.check_schema(schema)
    return Validator(json.loads(json.dumps(schema, allow_nan=False)))


class TestSchema:
    def test_what_cannot_be_loaded_is_left_out_and_told(self) -> None:
        schema, left_out = job_schema(CATALOG)
        assert ["optimizer 'sophia'" in message for message in left_out if "sophia" in message] == [True]
        assert "optimizer.forge-plugin-sophia:sophia" not in schema["$defs"]
        assert "optimizer.forge-plugin-muon:muon" in schema["$defs"]

    def test_good_jobs_are_valid(self, validator: Validator, load: Callable[..., Job]) -> None:
        job = load('[model.ffn]\ntype = "moe"\nexperts = 2\n[loggers.tensorboard]\n[parallel.fsdp]\ndegree = 1')
        validator.validate(tomllib.loads(dump_job(job, CATALOG)))
        validator.validate(tomllib.loads(Path("good.toml").read_text()))

    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def test_whatever_can_be_read_is_valid(self, validator: Validator, data: st.DataObject) -> None:
        validator.validate(data.draw(tables(Job, USABLE)))

    @pytest.mark.parametrize(
        ("text", "path"),
        [
            ("[optimizer]\nmomentun = 1.0", "optimizer"),
            ("[optimizer]\nlr = 0", "optimizer/lr"),
            ("[optimizer]\nlr = '1'", "optimizer/lr"),
            ("[train]\nprecision = 'fp16'", "train/precision"),
            ("[model.ffn]\nexperts = 3", "model/ffn"),
            ("[model.ffn]\ntype = 'moe'", "model/ffn"),
            ("[model.ffn]\ntype = 'muon'", "model/ffn/type"),
            ("[parallel.fdsp]", "parallel/fdsp"),
            ("[parallel.fsdp]\ndegree = 'all'", "parallel/fsdp/degree"),
            ("[wandb]", ""),
            ("[data]\nsources = {}", "data/sources"),
            ("[plugins.mine]\ntype = 'careful'\nlimits = 1", "plugins/mine"),
        ],
    )
    def test_mistakes_are_found_where_they_are(
        self, validator: Validator, text: str, path: str, load: Callable[..., Job]
    ) -> None:
        table = tomllib.loads(dump_job(load(), CATALOG))
        for section, keys in tomllib.loads(text).items():
            for key, value in keys.items() if section != "wandb" else ():
                old = table.setdefault(section, {}).get(key)
                table[section][key] = {**old, **value} if isinstance(value, dict) and isinstance(old, dict) else value
            table.setdefault(section, keys)
        if section == "model" and "type" not in keys["ffn"]:
            del table["model"]["ffn"]["type"]
        errors = [error for top in validator.iter_errors(table) for error in [*(top.context or []), top]]
        assert path in {"/".join(map(str, error.absolute_path)) for error in errors}

    def test_local_files_are_allowed_with_any_keys(self, validator: Validator, load: Callable[..., Job]) -> None:
        table = tomllib.loads(dump_job(load(), CATALOG))
        table["optimizer"] = {"type": "./mine.py:Mine", "anything": 1}
        validator.validate(table)

    def test_descriptions_and_defaults_are_given(self) -> None:
        schema, _ = job_schema(CATALOG)
        heads = schema["$defs"]["model.forge-plugin-transformer:transformer"]["properties"]["heads"]
        assert heads == {
            "type": "integer",
            "exclusiveMinimum": 0,
            "description": "Attention heads; must divide `dim`.",
            "default": 4,
        }
