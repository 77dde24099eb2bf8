"""`forge-run show`: all information about a run in its folder."""

from __future__ import annotations

import argparse
import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

from forge_core.checkpoint.run_diff import text_changes
from forge_core.checkpoint.run_folder import JOB, LOCK, PROVENANCE
from forge_core.cli.command_line import with_examples
from forge_core.contracts.errors import ExitCode
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import ANYTHING, COUNT, NUMBER, SECONDS, TEXT, Schema, array, by_name, keyed, maybe
from forge_kit.tools.tables import columns
from forge_plugin_runs.facts import RunFacts, demand_run, finite, manifest_of, read_run, size_of
from forge_plugin_runs.life import LIVES, Pulse
from forge_plugin_runs.run_list import run_keys
from forge_plugin_runs.words import age_text, count_text, size_text

INTERNAL = (LOCK,)


HEADING = "watch"


def command(argv: list[str]) -> int:
    """Show one run: job, versions, metrics, checkpoints, files.

    The row `next` has the command that continues it.
    """
    parser = argparse.ArgumentParser("forge-run show", description=command.__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    add_json(parser)
    with_examples(parser, "forge-run show runs/quickstart", "forge-run show runs/quickstart --json")
    options = parser.parse_args(argv)
    facts = all_facts(read_run(demand_run(options.run)))
    if options.json:
        print_json(facts)
    else:
        print(describe(facts))
    return ExitCode.FINISHED


def all_facts(run: RunFacts) -> dict[str, Any]:
    """Returns all information about a run in its folder, as plain types."""
    provenance = _provenance(run.folder)
    versions = {name: about["version"] for name, about in provenance.get("distributions", {}).items()}
    if versions:
        versions |= {"torch": provenance["torch"], "python": provenance["python"]}
    return {
        **run.facts(),
        "components": provenance.get("components", {}),
        "job": changed_keys(run.folder, Catalog.installed()),
        "versions": versions,
        "started_in": provenance.get("started_in"),
        "metrics": {name: value for name, value in run.last_line.items() if name != "counts"},
        "checkpoints": [_checkpoint(run.folder, step) for step in run.checkpoints],
        "files": dict(_files(run.folder)),
        "next": next_command(run),
    }


def changed_keys(folder: Path, catalog: Catalog) -> dict[str, Any]:
    """Returns the keys of a run's job that differ from their defaults, by path.

    Keys of components that are not installed are all listed, since their defaults are not known.
    """
    try:
        text = (folder / JOB).read_text(encoding="utf-8")
        skeleton = tomli_w.dumps(_types(tomllib.loads(text)))
    except (OSError, ValueError):
        return {}  # the problem is reported with the run
    # Compared with the same components without any of their keys: a key absent there and default here is no change.
    changes = text_changes(skeleton, text, catalog)
    return {change.path: change.after for change in changes if change.after is not None}


def _types(value: Any, keep: Sequence[str] = ("type",)) -> Any:
    """A job without all keys but the types of its components, and names of array entries, by which they are matched."""
    if isinstance(value, dict):
        return {key: _types(item) for key, item in value.items() if key in keep or _has_tables(item)}
    return [_types(item, ("type", "name")) for item in value] if isinstance(value, list) else value


def _has_tables(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))


def _provenance(folder: Path) -> Mapping[str, Any]:
    try:
        return json.loads((folder / PROVENANCE).read_text())
    except (OSError, ValueError):
        return {}


def _checkpoint(folder: Path, step: int) -> dict[str, Any]:
    manifest = manifest_of(folder, step)
    evaluation = manifest.get("evaluation") or {}
    # A manifest has the last evaluation, which may be of an earlier step
    of_this_step = evaluation.get("metrics", {}) if evaluation.get("step") == step else {}
    return {
        "step": step,
        "saved": manifest.get("time"),
        "tokens": manifest.get("tokens"),
        "evaluation": {name: finite(value) for name, value in of_this_step.items()},
    }


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(folder.iterdir()):
        if path.name not in INTERNAL:
            yield f"{path.name}/" if path.is_dir() else path.name, size_of(path)


def next_command(run: RunFacts) -> str:
    """Returns the command that makes sense next: it continues a run, or tries the model of a finished one."""
    folder = shlex.quote(str(run.folder))
    match run.state:
        case "running":
            return ""
        case "finished" if run.ended:
            return f"forge-run resume {folder} --resume-with-changes"
        case "finished":
            return f"forge-run resume {folder} --train.steps={2 * (run.steps or run.step)}"
        case "imported":
            return f"forge-run generate {folder}"
    return f"forge-run resume {folder}"


def describe(facts: Mapping[str, Any]) -> str:
    """Returns the facts as paragraphs of aligned rows."""
    blocks = [_summary(facts), *(_section(title, rows) for title, rows in _tables(facts) if rows)]
    return "\n\n".join(filter(None, blocks))


def _summary(facts: Mapping[str, Any]) -> str:
    steps = "" if facts["steps"] is None else f" of {facts['steps']:,}"
    state = f"{facts['state']} at step {facts['step']:,}{steps}"
    if facts["owner"]:
        state += f" ({facts['owner']})"
    now = datetime.now().timestamp()
    rows = [["run", facts["run"]], ["state", state], ["updated", f"{age_text(now - facts['updated'])} ago"]]
    rows += [["life", _life(facts)]] if facts["life"] else []
    rows += [["tokens", f"{facts['tokens']:,}"]] if facts["tokens"] else []
    rows += [["started in", facts["started_in"]]] if facts["started_in"] else []
    rows += [["ended", ending]] if (ending := _ending(facts)) else []
    rows += [["problem", facts["problem"]]] if facts["problem"] else []
    rows += [["next", facts["next"]]] if facts["next"] else []
    return columns(rows)


def _ending(facts: Mapping[str, Any]) -> str:
    """How the last start ended, with the whole reason; empty of one that runs or finished its steps."""
    end = facts["end"]
    if end is None:
        return f"for good: {facts['ended']}" if facts["ended"] else ""
    if not end["reason"]:
        return ""
    step = "" if end["step"] is None else f" after step {end['step']:,}"
    where = f", rank {end['rank']} on {end['host']}" if end["code"] not in (ExitCode.FINISHED, ExitCode.STOPPED) else ""
    kind = "for good" if end["final"] else end["cause"]
    return f"{kind}, exit code {end['code']}{step}{where}: {end['reason']}"


def _life(facts: Mapping[str, Any]) -> str:
    pulse = Pulse(life=facts["life"], age_s=facts["last_line_s"], step_s=facts["step_s"])
    return f"{pulse} ({LIVES[pulse.life]})" if pulse.life != "alive" else str(pulse)


def _tables(facts: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[Sequence[str]]]]:
    yield "job, where it differs from the defaults", [*_job_rows(facts)]
    yield "last step", [[name, _measure(name, value)] for name, value in facts["metrics"].items()]
    evaluation = [[name, _measure(name, value)] for name, value in facts["evaluation"].items()]
    yield f"last evaluation, of step {facts['evaluated']}", evaluation
    yield "checkpoints", [_checkpoint_row(each) for each in facts["checkpoints"]]
    yield "files", [[name, size_text(size)] for name, size in facts["files"].items()]
    yield "versions", [[name, version] for name, version in facts["versions"].items()]


def _job_rows(facts: Mapping[str, Any]) -> Iterator[list[str]]:
    """Types and keys by path, without components that the core adds to every job if none of their keys is listed."""
    keys = facts["job"]
    for path, type_ in facts["components"].items():
        own = {key: value for key, value in keys.items() if key.startswith(f"{path}.")}
        if own or not type_.startswith("forge-run/"):
            yield [f"{path}.type", type_]
    for path, value in keys.items():
        yield [path, tomli_w.dumps({"k": value}).removeprefix("k = ").strip() if value is not None else ""]


def _checkpoint_row(checkpoint: Mapping[str, Any]) -> list[str]:
    saved = checkpoint["saved"]
    when = _clock(saved) if saved else "cannot be read"
    evaluation = checkpoint["evaluation"].items()
    losses = [f"{name} {_measure(name, value)}" for name, value in evaluation if name.endswith("loss")]
    return [f"step {checkpoint['step']}", when, f"{count_text(checkpoint['tokens'])} tokens", "  ".join(losses)]


def _section(title: str, rows: Sequence[Sequence[str]]) -> str:
    return f"{title}\n" + "\n".join(f"  {line}" for line in columns(rows).split("\n"))


def _measure(name: str, value: Any) -> str:
    """A value of a line of metrics: a time of day, a duration or a share with its unit, a loss, or a plain number."""
    if not isinstance(value, int | float):
        return str(value)
    if name == "time":
        return _clock(value)
    if name == "step_seconds" or name.startswith("seconds/"):
        return f"{value:,.3g} s"
    if name.endswith("loss"):
        return f"{value:.4f}"  # with the digits of the log and of every other command
    return f"{value:.1%}" if name == "data_wait" else _plain(value)


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _plain(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    checkpoint = keyed(step=COUNT, saved=maybe(SECONDS), tokens=maybe(COUNT), evaluation=maybe(by_name(NUMBER)))
    run = keyed(
        **run_keys(),
        checkpoints=array(checkpoint),
        job=by_name(ANYTHING),
        components=by_name(TEXT),
        versions=by_name(TEXT),
        metrics=by_name(ANYTHING),
        files=by_name(COUNT),
        started_in=TEXT,
        next=TEXT,
    )
    return {"": run}
