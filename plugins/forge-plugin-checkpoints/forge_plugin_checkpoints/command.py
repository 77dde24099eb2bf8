"""`forge-run checkpoints`: inspects and manages the checkpoints of a run."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, fields_dict, frozen

from forge_core.checkpoint.storage import MANIFEST, UNFINISHED, How, find_faults, manifest_digest, read_manifest
from forge_core.cli.command_line import positive, with_examples
from forge_core.contracts.errors import CheckpointError, ExitCode, JobError
from forge_kit.tools.commands import count, gigabytes
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import (
    ANYTHING,
    COUNT,
    FLAG,
    NUMBER,
    SECONDS,
    TEXT,
    Schema,
    array,
    by_name,
    keyed,
    maybe,
    of,
)
from forge_kit.tools.outputs import free_path
from forge_kit.tools.tables import columns

if TYPE_CHECKING:
    from forge_core.contracts.runtime import Storage
    from forge_plugin_checkpoints.differences import Differences

PROGRAM = "forge-run checkpoints"
SHOWN = 20
"""Tensors that `diff` lists without `--all`."""


HEADING = "keep"


def command(argv: list[str]) -> int:
    """List, verify, compare, prune, export, or average checkpoints."""
    options = _parser().parse_args(_with_action(argv))
    return int(options.action(options))


def _with_action(argv: list[str]) -> list[str]:
    """Insert the default action `list` if no action follows the run."""
    has_run = bool(argv) and not argv[0].startswith("-")
    return [argv[0], "list", *argv[1:]] if has_run and (len(argv) == 1 or argv[1].startswith("-")) else argv


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description=command.__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    with_examples(
        parser,
        "forge-run checkpoints runs/quickstart",
        "forge-run checkpoints runs/quickstart --json",
        "forge-run checkpoints runs/quickstart verify 1500",
        "forge-run checkpoints runs/quickstart export --out model.safetensors",
        "forge-run checkpoints runs/quickstart merge --steps 1000,1250,1500 --like linear --out runs/merged",
    )
    actions = parser.add_subparsers(
        metavar="ACTION", required=True, help="list if left out; ACTION --help has its options"
    )
    add = partial(_add, actions)
    listing, verify = add("list", list_checkpoints), add("verify", verify_checkpoints)
    listing.add_argument("--full", action="store_true", help="compare SHA-256 of every file, not only sizes")
    verify.add_argument("steps", nargs="*", type=count, metavar="STEP", help="by default all")
    diff = add("diff", diff_checkpoints)
    diff.add_argument("first", metavar="A", help="a step of the run, or the path of a checkpoint or run folder")
    diff.add_argument("second", metavar="B", help="likewise")
    diff.add_argument(
        "--all", action="store_true", help=f"list every tensor that differs, not only {SHOWN}; JSON has all"
    )
    prune = add("prune", prune_checkpoints)
    prune.add_argument("--keep", type=positive, metavar="N", help="keep the newest N, overriding the job's settings")
    prune.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    export = add("export", export_checkpoint)
    export.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="NAME.safetensors for one file, else a folder"
    )
    export.add_argument("--step", type=count, metavar="N", help="by default the newest intact one")
    export.add_argument("--shard-size", type=gigabytes, default="5", metavar="GB", help="of each file of a folder (5)")
    merge = add("merge", merge_checkpoints)
    merge.add_argument(
        "--steps", type=step_numbers, required=True, metavar="A,B", help="of the checkpoints, two at least"
    )
    merge.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a folder that does not exist yet")
    how = merge.add_mutually_exclusive_group()
    how.add_argument(
        "--weights", type=weight_list, metavar="LIST", help="one number a step, as 3,2,1; by default equal"
    )
    how.add_argument(
        "--like",
        choices=("linear", "cosine", "sqrt"),
        help="weights that emulate this decay of a constant learning rate",
    )
    for action in (listing, verify, diff, prune, export, merge):
        add_json(action)
    return parser


def step_numbers(text: str) -> list[int]:
    """Reads numbers of steps, as `argparse` does."""
    try:
        return [count(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between them, got {text!r}") from None


def weight_list(text: str) -> list[float]:
    """Reads weights, as `argparse` does."""
    try:
        factors = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, got {text!r}") from None
    if not all(0 <= factor < math.inf for factor in factors) or not any(factors):
        raise argparse.ArgumentTypeError(f"must be finite, none negative and not all 0, got {text!r}")
    return factors


def _add(actions: Any, name: str, function: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """Add an action whose help is the docstring of its function."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=function.__doc__, description=function.__doc__, allow_abbrev=False
    )
    parser.set_defaults(action=function)
    return parser


# --- list and verify ---------------------------------------------------------------------------------------------


Bases = dict[str, list[str]]
"""Faults of bases by their paths: one base of many checkpoints is read once."""


def base_faults(manifest: Mapping[str, Any], method: How, bases: Bases) -> list[str]:
    """Returns the faults of the checkpoint that has what this one leaves out; none if it leaves nothing out."""
    if (base := manifest.get("base")) is None:
        return []
    if (path := base["path"]) not in bases:
        bases[path] = _faults_in_base(Path(path), base["digest"], method, bases)
    return bases[path]


def _faults_in_base(folder: Path, digest: str, method: How, bases: Bases) -> list[str]:
    try:
        if manifest_digest(folder) != digest:
            return [f"its base {folder} is another checkpoint now"]
        manifest = read_manifest(folder)
    except (OSError, CheckpointError):
        return [f"its base {folder} is not there"]
    faults = find_faults(folder, manifest, list(manifest["files"]), method)
    return [*(f"of its base, {fault}" for fault in faults), *base_faults(manifest, method, bases)]


@frozen
class Row:
    """One checkpoint in the list."""

    step: int
    manifest: Mapping[str, Any]
    """Its manifest; empty if it cannot be read."""
    size: int
    """Total bytes of its files."""
    faults: Sequence[str]

    @classmethod
    def of(cls, storage: Storage, step: int, method: How, bases: Bases) -> Row:
        """Check a checkpoint by `method`, and its base, unless `bases` has the faults of that.

        A manifest that cannot be read is a fault of the row, and raises nothing.
        """
        path = storage.path(step)
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            return cls(step, {}, sum(file.stat().st_size for file in path.glob("*")), [str(error)])
        # By the manifest: this machine may have a part of the files
        size = (path / MANIFEST).stat().st_size + sum(entry["size"] for entry in manifest["files"].values())
        faults = find_faults(path, manifest, list(manifest["files"]), method)
        if manifest["step"] != step:
            faults = [f"{path.name} holds step {manifest['step']}: it was renamed or copied", *faults]
        return cls(step, manifest, size, [*faults, *base_faults(manifest, method, bases)])

    def cells(self) -> list[str]:
        """Returns the columns of the list; `?` for entries of a manifest that cannot be read."""
        if not self.manifest:
            return [str(self.step), "?", _size(self.size), "?", "", "damaged"]
        saved = datetime.fromtimestamp(self.manifest["time"]).strftime("%Y-%m-%d %H:%M:%S")
        tokens = f"{self.manifest['tokens']:,}"
        return [str(self.step), saved, _size(self.size), tokens, self._loss(), "damaged" if self.faults else "intact"]

    def facts(self) -> dict[str, Any]:
        """The same as plain types, for JSON."""
        get = self.manifest.get
        names = {"step": self.step, "saved": get("time"), "size": self.size, "tokens": get("tokens")}
        metrics = (get("evaluation") or {}).get("metrics", {})
        evaluation = {"step": self.manifest["evaluation"]["step"], "metrics": metrics} if metrics else None
        return {
            **names,
            "evaluation": evaluation,
            "base": self.base,
            "merged": get("merged"),
            "faults": list(self.faults),
        }

    @property
    def base(self) -> str | None:
        """The checkpoint that has what this one leaves out, such as the frozen weights beside adapters."""
        return (self.manifest.get("base") or {}).get("path")

    def _loss(self) -> str:
        evaluation = self.manifest.get("evaluation") or {}
        loss = evaluation.get("metrics", {}).get("eval/loss")
        if loss is None:
            return ""
        return f"{loss:.4f}" + ("" if evaluation["step"] == self.step else f" (step {evaluation['step']})")


def list_checkpoints(options: argparse.Namespace) -> int:
    """List the checkpoints: step, date, size, tokens, loss of the last evaluation, and whether all files are there."""
    from forge_kit.tools.run_owner import owner

    storage = _storage(options.run)
    rows = list(_rows(storage, "full" if options.full else "sizes"))
    if options.json:
        unfinished = [path.name for path in _unfinished_folders(storage)]
        facts = {"run": str(options.run), "in_use_by": owner(options.run), "unfinished": unfinished}
        print_json({**facts, "checkpoints": [row.facts() for row in rows]})
        return ExitCode.FINISHED
    method = "SHA-256" if options.full else "sizes"
    head = ["step", "saved", "size", "tokens", "eval/loss", f"files ({method})"]
    if rows:
        _print_table(head, [row.cells() for row in rows], right=(0, 2, 3))
    else:
        print(f"{options.run} has no checkpoints")
    for line in (*_bases(rows), *_merges(rows), *_damage(rows), *_unfinished(storage)):
        print(line)
    if user := owner(options.run):
        print(f"in use by {user}")
    return ExitCode.FINISHED


def _rows(storage: Storage, method: How) -> Iterator[Row]:
    bases: Bases = {}
    for step in storage.steps():
        with suppress(FileNotFoundError):  # a running job may delete it meanwhile
            row = Row.of(storage, step, method, bases)
            # What a running job has deleted while it was checked is not damaged
            if step in storage.steps():
                yield row


def verify_checkpoints(options: argparse.Namespace) -> int:
    """Compare every file with its SHA-256, also of a base; exit code 1 if one is damaged."""
    storage = _storage(options.run)
    steps = storage.steps()
    for step in options.steps:
        _demand_step(step, steps, options.run)
    rows = []
    bases: Bases = {}
    for step in options.steps or steps:
        row = Row.of(storage, step, "full", bases)
        rows.append(row)
        if not options.json:
            print("\n".join(_damage([row])) or f"step {step}: intact, {_size(row.size)}", flush=True)
    if options.json:
        print_json({"run": options.run, "checkpoints": [row.facts() for row in rows]})
    elif not steps:
        print(f"{options.run} has no checkpoints")
    return ExitCode.FAILED if any(row.faults for row in rows) else ExitCode.FINISHED


def _bases(rows: Sequence[Row]) -> Iterator[str]:
    for base in dict.fromkeys(row.base for row in rows if row.base):
        yield f"base, which has the weights that were not trained: {base}"


def _merges(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if merged := row.manifest.get("merged"):
            like = f", like a {merged['like']} decay" if merged["like"] else ""
            parts = ", ".join(f"{each['weight']:.4g} x {each['path']}" for each in merged["sources"])
            yield f"step {row.step}: merged{like}: {parts}"


def _damage(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        yield from (f"step {row.step}: {fault}" for fault in row.faults)


def _unfinished(storage: Storage) -> Iterator[str]:
    yield from (f"{path.name}: unfinished; the next save removes it" for path in _unfinished_folders(storage))


def _unfinished_folders(storage: Storage) -> list[Path]:
    return sorted(storage.path(0).parent.glob(f"*{UNFINISHED}"))


# --- diff --------------------------------------------------------------------------------------------------------


def diff_checkpoints(options: argparse.Namespace) -> int:
    """Compare two checkpoints: tensors, progress, and the jobs that saved them."""
    from forge_core.checkpoint.run_diff import describe_changes, text_changes
    from forge_core.plugins.catalog import Catalog
    from forge_plugin_checkpoints.differences import compare_tensors

    (first, one), (second, other) = (_checkpoint(options.run, name) for name in (options.first, options.second))
    progress = list(_progress_changes(one["progress"], other["progress"]))
    changes = text_changes(one["job"], other["job"], Catalog.installed())
    if options.json:
        job = [{"key": change.path, "before": change.before, "after": change.after} for change in changes]
        tensors = asdict(compare_tensors(first, second))
        print_json({"first": first, "second": second, "progress": progress, "job": job, "tensors": tensors})
        return ExitCode.FINISHED
    print(f"{first} -> {second}")
    for change in progress:
        print("{key}: {before} -> {after}".format(**change))
    print(f"job:\n{describe_changes(changes)}" if changes else "job: the same")
    _print_differences(compare_tensors(first, second), sys.maxsize if options.all else SHOWN)
    return ExitCode.FINISHED


def _progress_changes(one: Any, other: Any, path: str = "") -> Iterator[dict[str, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from _progress_changes(one.get(key), other.get(key), f"{path}.{key}" if path else key)
    elif one != other:
        yield {"key": path, "before": one, "after": other}


def _print_differences(differences: Differences, shown: int) -> None:
    for title, names in (
        ("only in the first", differences.only_first),
        ("only in the second", differences.only_second),
        ("another shape or dtype", differences.reshaped),
    ):
        if names:
            print(f"{title} ({len(names)}):", *names[:shown], *_left_out(names, shown), sep="\n  ")
    print(f"tensors: {differences.equal} equal, {len(differences.changed)} with other values")
    rows = [[d.name, f"{d.largest:.3g}", f"{d.relative:.3g}"] for d in differences.changed]
    if rows:
        _print_table(["tensor", "largest difference", "relative"], rows[:shown], right=(1, 2))
    for line in _left_out(rows, shown):
        print(line)


def _left_out(entries: Sequence[Any], shown: int) -> list[str]:
    return [f"… and {len(entries) - shown} more (--all)"] if len(entries) > shown else []


def _checkpoint(run: Path, name: str) -> tuple[Path, Mapping[str, Any]]:
    from forge_core.checkpoint.resume import locate

    if not name.isdecimal():
        return locate(Path(name), "sizes")
    storage = _storage(run)
    _demand_step(int(name), storage.steps(), run)
    return locate(storage.path(int(name)), "sizes")


# --- prune -------------------------------------------------------------------------------------------------------


def prune_checkpoints(options: argparse.Namespace) -> int:
    """Delete what the job's retention does not keep; never the only intact checkpoint."""
    from forge_core.checkpoint.run_folder import owned

    storage = _storage(options.run)
    with owned(options.run, "stop that run first, or wait until it ends"):
        return _prune(options, storage)


def _prune(options: argparse.Namespace, storage: Storage) -> int:
    from forge_core.checkpoint.manager import Checkpoints
    from forge_core.job import Retention
    from forge_kit.tools.run_owner import checkpoint_table

    table = {"keep": options.keep} if options.keep else checkpoint_table(options.run)
    retention = Retention(**{name: table[name] for name in fields_dict(Retention) if name in table})
    doomed = Checkpoints(storage, retention, "full").to_prune()
    staying = [step for step in storage.steps() if step not in doomed]
    # By digests, though it takes long: sizes do not show every damage, and deleting is for good
    bases: Bases = {}
    faults = [Row.of(storage, step, "full", bases).faults for step in staying] if doomed else []
    if doomed and all(faults):
        raise CheckpointError(f"nothing is deleted, since none of what would stay is intact: {faults[-1][0]}")
    for step in doomed:
        if not options.json:
            print(f"{'would delete' if options.dry_run else 'deleting'} {storage.path(step)}")
        if not options.dry_run:
            storage.delete(step)
    if options.json:
        print_json({"run": options.run, "dry_run": options.dry_run, "deleted": doomed, "staying": staying})
        return ExitCode.FINISHED
    print(f"{len(doomed)} of {len(doomed) + len(staying)}{' would be' if options.dry_run else ''} deleted; ", end="")
    print(f"staying: {', '.join(map(str, staying)) or 'none'}")
    return ExitCode.FINISHED


# --- export ------------------------------------------------------------------------------------------------------


def export_checkpoint(options: argparse.Namespace) -> int:
    """Write the weights as safetensors, with the job in their metadata."""
    from forge_core.checkpoint.resume import locate
    from forge_plugin_checkpoints.export import export_weights

    output = free_path(options.out, "--out")
    storage = _storage(options.run)
    if options.step is not None:
        _demand_step(options.step, storage.steps(), options.run)
    path, manifest = locate(options.run if options.step is None else storage.path(options.step), "full")
    files = export_weights(path, manifest, output, options.shard_size)
    if options.json:
        sizes = [{"file": file, "bytes": file.stat().st_size} for file in files]
        print_json({"checkpoint": path, "step": manifest["step"], "out": output, "files": sizes})
        return ExitCode.FINISHED
    for file in files:
        print(f"{file}: {_size(file.stat().st_size)}")
    return ExitCode.FINISHED


# --- merge -------------------------------------------------------------------------------------------------------


def merge_checkpoints(options: argparse.Namespace) -> int:
    """Average the weights of checkpoints, or emulate a decay of the learning rate, into a new checkpoint."""
    from forge_core.checkpoint.resume import locate
    from forge_core.checkpoint.run_folder import TOKENIZER
    from forge_plugin_checkpoints.merge import decay_weights, merge

    output = free_path(options.out, "--out")
    storage = _storage(options.run)
    weights = options.weights or [1.0] * len(options.steps)
    if len(options.steps) < 2 or len(set(options.steps)) < len(options.steps):
        raise JobError(f"{PROGRAM}: --steps {','.join(map(str, options.steps))}: name two steps at least, each once")
    if len(weights) != len(options.steps):
        raise JobError(f"{PROGRAM}: --weights has {len(weights)} numbers for the {len(options.steps)} of --steps")
    for step in options.steps:
        _demand_step(step, storage.steps(), options.run)
    # In order of steps, as `decay_weights` takes them; each weight goes with its step
    pairs = sorted(zip(options.steps, weights, strict=True))
    steps = [step for step, _ in pairs]
    weights = decay_weights(steps, options.like) if options.like else [weight for _, weight in pairs]
    sources = [locate(storage.path(step), "full") for step in steps]
    tokenizer = options.run / TOKENIZER
    folder = tokenizer if tokenizer.is_dir() else None
    checkpoint, records = merge(sources, weights, output, options.like or "", folder)
    factors = [manifest["progress"]["schedule"] for _, manifest in sources]
    if options.json:
        print_json({"checkpoint": checkpoint, "like": options.like, "sources": [asdict(each) for each in records]})
        return ExitCode.FINISHED
    print(columns([["STEP", "WEIGHT"], *([str(each.step), f"{each.weight:.6g}"] for each in records)]))
    if options.like and min(factors) < max(factors):
        print(
            f"the rate was not constant: the schedule went from {factors[0]:.3g} to {factors[-1]:.3g} of it meanwhile"
        )
    print(f"{checkpoint}: weights alone, for generate, evaluate, export and [checkpoint.load]")
    return ExitCode.FINISHED


# --- common ------------------------------------------------------------------------------------------------------


def _storage(run: Path) -> Storage:
    from forge_core.checkpoint.run_folder import refuse_file, storage_of

    refuse_file(run)
    if not run.is_dir():
        raise JobError(f"{PROGRAM}: there is no folder {run}")
    if (run / MANIFEST).is_file():
        raise JobError(f"{PROGRAM}: {run} is a checkpoint; give the folder of its run")
    return storage_of(run)


def _demand_step(step: int, steps: Sequence[int], run: Path) -> None:
    if step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise JobError(f"{PROGRAM}: {run} has no checkpoint of step {step}; there are {known}")


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print with colours and lines on a terminal, else as plain columns."""
    if not sys.stdout.isatty():
        print(columns([[cell.upper() for cell in head], *rows]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for number, title in enumerate(head):
        table.add_column(title, justify="right" if number in right else "left")
    for row in rows:
        table.add_row(*row, style="red" if "damaged" in row else None)
    Console().print(table)


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    from forge_plugin_checkpoints.differences import Differences

    source = keyed(path=TEXT, step=COUNT, digest=TEXT, weight=NUMBER)
    row = keyed(
        step=COUNT,
        saved=maybe(SECONDS),
        size=COUNT,
        tokens=maybe(COUNT),
        evaluation=maybe(keyed(step=COUNT, metrics=by_name(NUMBER))),
        base=maybe(TEXT),
        merged=maybe(keyed(like=TEXT, sources=array(source))),
        faults=array(TEXT),
    )
    rows = {"run": TEXT, "checkpoints": array(row)}
    listed = keyed(in_use_by=TEXT, unfinished=array(TEXT), **rows)
    change = keyed(key=TEXT, before=ANYTHING, after=ANYTHING)
    changes = {"progress": array(change), "job": array(change), "tensors": of(Differences)}
    files = array(keyed(file=TEXT, bytes=COUNT))
    return {
        "": listed,
        "list": listed,
        "verify": keyed(**rows),
        "diff": keyed(first=TEXT, second=TEXT, **changes),
        "prune": keyed(run=TEXT, dry_run=FLAG, deleted=array(COUNT), staying=array(COUNT)),
        "export": keyed(checkpoint=TEXT, step=COUNT, out=TEXT, files=files),
        "merge": keyed(checkpoint=TEXT, like=maybe(TEXT), sources=array(source)),
    }
