"""`check`, `plugins`, `explain`, and `explain schema` over the same components."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_core import dump_job, load_job
from forge_core.cli import main
from forge_core.contracts.errors import ExitCode
from forge_core.job import TrainSection
from forge_core.plugins.catalog import Catalog, Distribution, Offer
from forge_kit.tools.documented_keys import field_docs
from forge_plugin_author.explain import explain, find
from forge_plugin_author.plugins import select
from forge_plugin_author.schema import command as print_schema
from forge_testing.refusals import lacks, refuses
from forge_testing.stale import left_overs, stale_entries

CONFIGS = Path(__file__).parents[2] / "configs"


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """Yields the path of each key whose value is no table; arrays of tables have numbers."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if is_tables(value) else ()
    if not entries:
        yield path
    for name, entry in entries:
        yield from leaves(entry, f"{path}.{name}" if path else str(name))


def is_tables(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(entry, dict) for entry in value)


Run = Callable[..., tuple[int, str, str]]
Python = Callable[..., subprocess.CompletedProcess[str]]
REQUIRES = "Requires-Dist: forge-run>=0.2,<0.3\n"


class TestCheck:
    def test_a_good_job_is_ok_and_its_parts_are_told(self, forge_run: Run, good_job: Path) -> None:
        code, out, err = forge_run("check", str(good_job), "--world-size", "2", "--parallel.tp.degree=2")
        assert (code, err) == (0, "")
        assert out.splitlines() == [
            f"ok: {good_job}",
            "",
            "model                 forge-plugin-transformer/transformer",
            "model.ffn             forge-plugin-transformer/swiglu",
            "data.sources.0        forge-plugin-text/text",
            "data.tokenizer        forge-plugin-text/bytes",
            "data.packing          forge-run/concatenate",
            "optimizer             forge-plugin-muon/muon",
            "scheduler             forge-run/constant",
            "loss                  forge-run/cross_entropy",
            "executor              forge-run/plain",
            "checkpoint.storage    forge-run/local",
            "parallel.tp           forge-plugin-tp/tp",
            "evaluations.held_out  forge-run/held_out",
            "loggers.console       forge-run/console",
            "loggers.jsonl         forge-run/jsonl",
            "",
            "layout: tp 2",
            "from: forge-plugin-muon 0.2.0, forge-plugin-text 0.2.0, forge-plugin-tp 0.2.0, "
            "forge-plugin-transformer 0.2.0, forge-run 0.1.0",
        ]

    def test_nothing_is_created(
        self, forge_run: Run, good_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert forge_run("check", str(good_job))[0] == 0
        assert list(tmp_path.iterdir()) == []

    def test_without_a_file_its_usage_is_shown(self, forge_run: Run) -> None:
        code, _, err = forge_run("check", "--train.steps=1")
        assert code == ExitCode.BAD_JOB
        assert "usage: forge-run check" in err

    def test_workers_are_a_number_from_0(self, forge_run: Run, good_job: Path) -> None:
        assert forge_run("check", str(good_job), "--workers=0")[0] == 0
        code, _, err = forge_run("check", str(good_job), "--workers=-1")
        assert code == ExitCode.BAD_JOB
        assert not lacks(err, "--workers", -1, 0)

    def test_overrides_may_hold_spaces_and_stand_anywhere(self, forge_run: Run, good_job: Path) -> None:
        code, out, _ = forge_run("check", '--optimizer={type = "adamw", lr = 1.0}', str(good_job))
        assert code == 0
        assert "forge-plugin-adamw/adamw" in out

    def test_json_has_what_the_job_is_made_of(self, forge_run: Run, good_job: Path) -> None:
        code, out, err = forge_run("check", str(good_job), "--json")
        facts = json.loads(out)
        assert (code, err, facts["ok"], facts["problems"]) == (0, "", True, [])
        assert (facts["files"], facts["layout"]) == ([str(good_job)], "one process")
        assert facts["components"]["model.ffn"] == "forge-plugin-transformer/swiglu"
        assert facts["distributions"]["forge-plugin-muon"] == "0.2.0"

    def test_json_has_file_line_key_and_message_of_each_problem(self, forge_run: Run, tmp_path: Path) -> None:
        job = tmp_path / "job.toml"
        job.write_text("[train]\nsteps = 'x'\nglobal_batch_size = 4\nseq_len = 8\n")
        code, out, err = forge_run("check", str(job), "--json", "--train.sed=1")
        facts = json.loads(out)
        assert (code, err, facts["ok"]) == (ExitCode.BAD_JOB, "", False)
        by_key = {problem["key"]: problem for problem in facts["problems"]}
        assert by_key.keys() == {"train.steps", "train.sed", "model", "data", "optimizer"}
        message = by_key["train.steps"].pop("message")
        assert not lacks(message, "int", "str 'x'")
        place = {"file": str(job), "line": 2, "key": "train.steps"}
        assert by_key["train.steps"] == {**place, "id": "wrong-value", "suggestion": None}
        assert (by_key["train.sed"]["file"], by_key["train.sed"]["line"]) == ("--train.sed=1", None)


class TestPlugins:
    def test_what_is_installed_is_listed_in_columns(self, forge_run: Run) -> None:
        code, out, _ = forge_run("plugins", "--kind", "parallel")
        assert code == 0
        rows = [line.split() for line in out.splitlines()]
        assert rows[0] == ["KIND", "TYPE", "DISTRIBUTION", "VERSION", "TARGET"]
        assert [row[:4] for row in rows[1:]] == [
            ["parallel", "fsdp", "forge-plugin-fsdp", "0.2.0"],
            ["parallel", "replicate", "forge-run", "0.1.0"],
            ["parallel", "tp", "forge-plugin-tp", "0.2.0"],
        ]

    def test_conflicts_are_told(self, forge_run: Run) -> None:
        _, out, _ = forge_run("plugins", "lion")
        conflicts = [line for line in out.splitlines() if line.startswith("conflict: ")]
        assert len(conflicts) == 2
        facts = ("optimizer 'lion'", "forge-plugin-lion ", "forge-plugin-lion-fast")
        assert [lacks(line, *facts) for line in conflicts] == [[], []]

    @pytest.mark.parametrize(
        ("name", "kind", "found"),
        [
            ("tp", None, ["forge-plugin-tp/tp"]),
            ("forge-plugin-tp", None, ["forge-plugin-tp/tp"]),
            ("forge-plugin-tp/tp", None, ["forge-plugin-tp/tp"]),
            (
                "forge-plugin-transformer",
                None,
                [f"forge-plugin-transformer/{t}" for t in ("swiglu", "ffn", "transformer")],
            ),
            ("forge-plugin-transformer", "ffn", ["forge-plugin-transformer/swiglu"]),
        ],
    )
    def test_a_distribution_or_type_can_be_selected(
        self, name: str, kind: str | None, found: list[str], small_catalog: Catalog
    ) -> None:
        assert [offer.qualified for offer in select(small_catalog, name, kind)] == found

    def test_kinds_are_listed_on_request_only(self, small_catalog: Catalog) -> None:
        assert "kind" not in {offer.kind for offer in select(small_catalog)}
        assert {offer.kind for offer in select(small_catalog, kind="kind")} == {"kind"}

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["muno"], "forge-run plugins: no installed distribution or type is called 'muno'; did you mean 'muon'?\n"),
            (
                ["--kind=optimiser"],
                "forge-run plugins: no installed component is of kind 'optimiser'; did you mean 'optimizer'?\n",
            ),
        ],
    )
    def test_unknown_names_get_suggestions(self, argv: list[str], message: str, forge_run: Run) -> None:
        assert forge_run("plugins", *argv) == (ExitCode.BAD_JOB, "", message)

    def test_json_has_every_column(self, forge_run: Run) -> None:
        _, out, _ = forge_run("plugins", "muon", "--json")
        assert json.loads(out) == [
            {
                "kind": "optimizer",
                "type": "muon",
                "distribution": "forge-plugin-muon",
                "version": "0.2.0",
                "target": "job_parts:Muon",
                "editable": "",
                "conflict": "",
                "check": None,
                "distribution_problems": [],
            }
        ]

    def test_sources_that_gained_entry_points_are_told(self, tmp_path: Path) -> None:
        (tmp_path / "pyproject.toml").write_text('[project.entry-points."forge.optimizer"]\nold = "a:B"\nnew = "a:C"\n')
        url = json.dumps({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
        offer = Offer("optimizer", "old", "a:B", Distribution("forge-plugin-mine", "0.1", (), url))
        [line] = stale_entries([offer.distribution], Catalog([offer]))
        assert not lacks(line, "forge-plugin-mine 0.1", "optimizer new", f"pip install --no-deps -e {tmp_path}")


class TestPluginsCheck:
    """Over real distributions, each loaded in a process of its own."""

    @pytest.fixture
    def site(self, tmp_path: Path) -> Path:
        """A folder on the path with distributions that load, that import torch, and that are broken."""
        (tmp_path / "good_one.py").write_text(
            "from attrs import frozen\nfrom forge_core import OptimizerComponent\n"
            "@frozen(kw_only=True)\nclass Good(OptimizerComponent):\n    pass\n"
        )
        (tmp_path / "torch.py").write_text("")  # stands in for the real one, which takes seconds
        (tmp_path / "heavy_one.py").write_text("import torch\nfrom good_one import Good\n")
        (tmp_path / "dying_one.py").write_text("import os\nos._exit(3)\n")
        info = tmp_path / "forge_plugin_probe-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: forge-plugin-probe\nVersion: 1.0\n" + REQUIRES)
        targets = {
            "good": "good_one:Good",
            "heavy": "heavy_one:Good",
            "absent": "no_one:Good",
            "dying": "dying_one:Good",
        }
        entries = "".join(f"{type_} = {target}\n" for type_, target in targets.items())
        (info / "entry_points.txt").write_text(f"[forge.optimizer]\n{entries}")
        return tmp_path

    def test_each_is_loaded_apart_from_the_others(self, python: Python, site: Path) -> None:
        done = python("-m", "forge_core", "plugins", "forge-plugin-probe", "--check", "--json", path=site)
        assert done.returncode == ExitCode.FAILED, done.stderr
        checks = {row["type"]: row["check"] for row in json.loads(done.stdout)}
        assert checks["good"]["error"] == checks["heavy"]["error"] == ""
        assert (checks["good"]["torch"], checks["heavy"]["torch"]) == (False, True)
        absent = ("optimizer 'absent'", "forge-plugin-probe 1.0", "no_one:Good", "ModuleNotFoundError")
        assert not lacks(checks["absent"]["error"], *absent)
        assert not lacks(checks["dying"]["error"], "optimizer forge-plugin-probe/dying", "exit code 3")

    def test_the_table_shows_errors_below(self, python: Python, site: Path) -> None:
        done = python("-m", "forge_core", "plugins", "absent", "--check", path=site)
        assert done.returncode == ExitCode.FAILED
        head, row, error = done.stdout.splitlines()
        assert head.split() == ["KIND", "TYPE", "DISTRIBUTION", "VERSION", "LOADS", "TARGET"]
        assert row.split() == ["optimizer", "absent", "forge-plugin-probe", "1.0", "error", "no_one:Good"]
        assert error.startswith("error: ")
        assert not lacks(error, "optimizer 'absent'")

    def test_what_is_wrong_with_distributions_and_components_is_told_once(self, python: Python, site: Path) -> None:
        rival = site / "forge_plugin_rival-2.0.dist-info"
        rival.mkdir()
        (rival / "METADATA").write_text("Metadata-Version: 2.1\nName: forge-plugin-rival\nVersion: 2.0\n")
        (rival / "entry_points.txt").write_text("[forge.optimizer]\ngood = good_one:Good\nother = good_one:Good\n")
        done = python("-m", "forge_core", "plugins", "forge-plugin-rival", "--check", path=site)
        assert done.returncode == ExitCode.FAILED
        *_, conflict, silent, empty, unbound, silent_too, empty_too = done.stdout.splitlines()
        assert conflict.startswith("conflict: ")
        assert not lacks(conflict, "optimizer 'good'", "forge-plugin-rival", "forge-plugin-probe 1.0")
        assert [line.partition("): ")[0] for line in (silent, empty)] == 2 * [
            "problem: optimizer 'good' (good_one:Good"
        ]
        assert not lacks(silent, "docstring")
        assert not lacks(empty, "build(self, context, parameters)", "OptimizerComponent")
        assert unbound.startswith("problem: forge-plugin-rival 2.0: ")
        assert not lacks(unbound, "forge-run")
        assert silent_too == silent.replace("'good'", "'other'")
        assert empty_too == empty.replace("'good'", "'other'")

    def test_where_nothing_is_wrong_it_succeeds(self, python: Python) -> None:
        done = python("-m", "forge_core", "plugins", "forge-plugin-wsd", "--check")
        assert done.returncode == ExitCode.FINISHED, done.stdout
        _, row = done.stdout.splitlines()
        assert row.split()[:3] == ["scheduler", "wsd", "forge-plugin-wsd"]

    def test_what_the_catalog_passes_over_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, version in (("first", "2.0"), ("second", "1.0"), ("third", "")):
            info = tmp_path / name / "forge_plugin_twice.dist-info"
            info.mkdir(parents=True)
            (info / "entry_points.txt").write_text("[forge.loss]\ntwice = twice:Twice\n")
            if version:
                (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: forge-plugin-twice\nVersion: {version}\n")
        for name in ("third", "second", "first"):
            monkeypatch.syspath_prepend(str(tmp_path / name))
        hidden, interrupted = left_overs()
        assert not lacks(hidden, f"forge-plugin-twice 1.0 in {tmp_path}/second", f"2.0 in {tmp_path}/first")
        assert not lacks(interrupted, f"{tmp_path}/third", "loss twice", ".dist-info")

    def test_listing_does_not_import_them(self, python: Python, site: Path) -> None:
        done = python("-m", "forge_core", "plugins", "dying", path=site)
        assert done.returncode == 0
        assert "dying_one:Good" in done.stdout


class TestExplain:
    def test_a_section_tells_its_keys(self, small_catalog: Catalog) -> None:
        text = explain("train", small_catalog)
        doc = field_docs(TrainSection)["steps"][:30]
        assert f"steps: int (required, > 0, <= 9007199254740992)\n    {doc}" in text
        assert "precision: one of 'bf16', 'fp32', 'fp64' (default \"fp32\")\n" in text

    def test_a_component_tells_its_class_and_inherited_keys(self, small_catalog: Catalog) -> None:
        text = explain("data.sources.text", small_catalog)
        assert text.startswith("dataset forge-plugin-text/text\n\nText files.\n\npath: str (required, not empty)")
        assert "\nname: str (optional, match '" in text

    def test_a_kind_tells_the_installed_types_even_if_one_is_broken(self, small_catalog: Catalog) -> None:
        text = explain("optimizer", small_catalog)
        assert "muon:\n    Orthogonalised momentum.\n" in text
        assert re.search(r"^sophia:\n    .*optimizer 'sophia'.*forge-plugin-sophia 0\.1\.0", text, re.MULTILINE)
        assert not lacks(text.splitlines()[-1], "forge-run explain optimizer.TYPE")

    @pytest.mark.parametrize(
        ("path", "start"),
        [
            ("", "a job\n"),
            ("train.steps", "steps: int (required, > 0, <= 9007199254740992)"),
            ("optimizer.adamw", "optimizer forge-plugin-adamw/adamw\n"),
            ("optimizer.forge-plugin-adamw/adamw", "optimizer forge-plugin-adamw/adamw\n"),
            ("optimizer.adamw.lr", "lr: float (default 0.0003, > 0)"),
            ("optimizer.adamw.weight_decay", "weight_decay: float or scheduler table (default 0.1)"),
            ("optimizer.forge_testing:TinyAdamW", "optimizer forge_testing.tiny:TinyAdamW\n"),
            ("model.transformer.ffn.moe.router.topk", "router forge-plugin-moe/topk\n"),
            ("model.ffn.moe", "ffn forge-plugin-moe/moe\n"),
            ("model.ffn.moe.router.topk", "router forge-plugin-moe/topk\n"),
            ("model.transformer.rope", "[model.transformer.rope]\n"),
            ("model.transformer.rope.base", "base: float (default 10000.0, > 0)"),
            ("loggers.tensorboard", "logger forge-plugin-tensorboard/tensorboard\n"),
            ("router.topk", "router forge-plugin-moe/topk\n"),
            ("checkpoint.storage.local", "storage forge-run/local\n"),
        ],
    )
    def test_paths_lead_through_sections_types_kinds_and_keys(
        self, path: str, start: str, small_catalog: Catalog
    ) -> None:
        assert explain(path, small_catalog).startswith(start)

    @pytest.mark.parametrize(
        ("path", "kind"), [("scheduler", "scheduler"), ("model.ffn", "ffn"), ("parallel", "parallel"), ("ffn", "ffn")]
    )
    def test_a_path_that_takes_a_component_names_its_kind_and_what_it_is(
        self, path: str, kind: str, small_catalog: Catalog
    ) -> None:
        first, _, second = explain(path, small_catalog).splitlines()[:3]
        assert first.startswith(f"{path} ")
        assert not lacks(first, f"kind {kind}")
        assert inspect.getdoc(small_catalog.kind_base(kind)).startswith(second)

    @pytest.mark.parametrize(
        ("path", "facts"),
        [
            ("optimzer", ["'optimzer'", "'optimizer'"]),
            ("train.step", ["'train.step'", "'steps'"]),
            ("optimizer.moun", ["optimizer 'moun'", "'muon'"]),
            ("model.transformer.rope.zzz", ["'model.transformer.rope.zzz'", "base, scaling"]),
            ("train.steps.more", ["'train.steps.more'", "nothing below"]),
        ],
    )
    def test_what_does_not_exist_gets_a_suggestion(self, path: str, facts: list[str], small_catalog: Catalog) -> None:
        with refuses("", *facts):
            explain(path, small_catalog)

    def test_defaults_of_components_and_named_tables_are_shown(self, small_catalog: Catalog) -> None:
        text = explain("model.transformer", small_catalog)
        assert 'ffn: ffn table (default type = "swiglu")\n    ' in text
        [_, hooks] = [line for line in explain("", small_catalog).splitlines() if "[hooks.NAME]" in line]
        assert not lacks(hooks, "`type`", "installed: grad_histogram")

    def test_json_has_keys_types_defaults_and_limits(self, forge_run: Run) -> None:
        def facts(path: str) -> dict:
            code, out, _ = forge_run("explain", path, "--json")
            assert code == 0
            return json.loads(out)

        assert facts("train.seq_len") == {
            "path": "train.seq_len",
            "doc": "",
            "types": [],
            "keys": [
                {
                    "name": "seq_len",
                    "type": "int",
                    "choices": [],
                    "required": True,
                    "default": "",
                    "must": ["be > 0"],
                    "doc": "Tokens per sequence.",
                    "table": "train",
                }
            ],
            "rules": [],
            "fix": "",
            "page": "",
        }
        [precision] = [key for key in facts("train")["keys"] if key["name"] == "precision"]
        assert (precision["choices"], precision["default"]) == (["bf16", "fp32", "fp64"], '"fp32"')
        assert "muon" in facts("optimizer")["types"]
        assert forge_run("explain", "trian", "--json")[0] == ExitCode.BAD_JOB

    @pytest.mark.parametrize("config", ["quickstart", "moe"])
    def test_every_key_of_a_job_is_explained_as_messages_name_it(self, config: str, catalog: Catalog) -> None:
        """Without the type, and with numbers of arrays and names of tables."""
        job = tomllib.loads(dump_job(load_job(CONFIGS / f"{config}.toml", with_data=False), catalog))
        paths = [path for path in leaves(job) if not path.endswith(".type")]
        assert len(paths) > 60
        for path in paths:
            assert find(path, catalog).path == path

    def test_a_key_of_several_types_is_explained_for_each_with_their_rules(
        self, catalog: Catalog, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["explain", "model.ffn.router.top_k", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        tables = {key["table"].rpartition(".")[2]: key["default"] for key in facts["keys"]}
        assert (tables["hash"], tables["sigmoid_topk"]) == ("1", "2")
        [rule] = [each["rule"] for each in facts["rules"] if each["table"].endswith("hash")]
        assert rule == "Checks that there are K experts."
        # Once, with the tables that it is true of
        text = explain("model.ffn.router.top_k", catalog)
        assert text.count("of model.ffn.router.sigmoid_topk, model.ffn.router.softmax_topk") == 2

    def test_a_table_may_have_any_name_but_one_that_may_be_meant(self, catalog: Catalog) -> None:
        assert "Share of the average" in explain("plugins.mine.decay", catalog)
        with refuses("", "'fsdp'"):
            explain("parallel.fdsp.degree", catalog)

    def test_the_command_prints_it(self, forge_run: Run) -> None:
        assert forge_run("explain", "train.seq_len") == (
            0,
            "seq_len: int (required, > 0)\n    Tokens per sequence.\n",
            "",
        )

    def test_a_type_alone_is_found_where_one_kind_has_it(self, small_catalog: Catalog) -> None:
        assert explain("muon", small_catalog) == explain("optimizer.muon", small_catalog)
        with refuses("", "'muonn'", "'optimizer.muon'"):
            explain("muonn", small_catalog)


class TestSchema:
    def test_it_is_json_on_standard_output_and_what_is_left_out_is_told_apart(
        self, small_catalog: Catalog, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert print_schema([]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["title"] == "Forge job"
        assert not lacks(err, "optimizer 'sophia'")
