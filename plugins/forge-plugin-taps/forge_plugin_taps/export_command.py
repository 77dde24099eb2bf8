"""`forge-run inside taps export`: a store in the form of another library."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_core.cli.command_line import with_examples
from forge_core.contracts.errors import ExitCode, JobError
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, TEXT, Schema, array, keyed
from forge_kit.tools.outputs import free_folder, new_folder
from forge_kit.tools.tables import columns

FORMS = ("npz", "saelens", "arrow")


HEADING = "use"


def command(argv: list[str]) -> int:
    """Show an activation store, or convert it for another library.

    `npz`: one NumPy file for each step, with an array for each point, and one for each fact of the tokens. `arrow`: a
    dataset of Hugging Face's `datasets` with a row for each token. `saelens`: a dataset for each point, with a row for
    each sequence, as SAELens' CacheActivationsRunner writes it; the store must have all positions. NumPy and Arrow have
    no bfloat16: such values become float32, and the command reports this.
    """
    parser = argparse.ArgumentParser(prog="forge-run inside taps", description=command.__doc__)
    parser.add_argument("action", choices=("show", "export"), help="what to do")
    parser.add_argument("store", type=Path, metavar="STORE", help="a store, a run folder with one, or one step of it")
    parser.add_argument("--to", choices=FORMS, help="the form")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write (STORE/../STORE-FORM)")
    add_json(parser)
    with_examples(
        parser,
        "forge-run inside taps show acts",
        "forge-run inside taps export acts --to npz",
        "forge-run inside taps export acts --to saelens --out acts-saelens",
    )
    options = parser.parse_args(argv)
    if (options.action == "export") != (options.to is not None):
        parser.error("export needs --to, and show has none")
    if options.out is not None:
        options.out = free_folder(options.out, "--out")
    from forge_plugin_taps.store_reader import steps_of

    if not (steps := steps_of(options.store)):
        raise JobError(
            f"{options.store} has no step of a store; the sink `store` and forge-run inside extract make some"
        )
    return _show(options, steps) if options.action == "show" else _export(options, steps)


def _show(options: argparse.Namespace, steps: list[Path]) -> int:
    points = _points(steps)
    if options.json:
        print_json({"store": options.store, "steps": _numbers(steps), "points": points})
        return ExitCode.FINISHED
    rows = [["point", "shape", "dtype"]]
    rows += [[point["point"], " x ".join(map(str, point["shape"])), point["dtype"]] for point in points]
    print(columns(rows))
    numbers = [str(number) for number in _numbers(steps)]
    print(f"{len(steps)} steps: {', '.join(numbers if len(numbers) < 9 else [*numbers[:3], '…', numbers[-1]])}")
    return ExitCode.FINISHED


def _points(steps: list[Path]) -> list[dict[str, Any]]:
    """Returns name, shape and dtype of each point, as in the last step that has it."""
    from forge_plugin_taps.store_reader import manifest_of, steps_with

    found = []
    for name, having in steps_with(steps).items():
        entry = manifest_of(having[-1])["files"][f"{name}.safetensors"]
        found.append({"point": name, "shape": entry["shape"], "dtype": entry["dtype"]})
    return found


def _numbers(steps: list[Path]) -> list[int]:
    return [int(step.name.rpartition("-")[2]) for step in steps]


def _export(options: argparse.Namespace, steps: list[Path]) -> int:
    from forge_plugin_taps.exporting import EXPORTS, cast_points
    from forge_plugin_taps.store_reader import steps_with

    # `.` and `..` have no name from which the folder beside them could be named.
    store = options.store if options.store.name not in ("", "..") else options.store.resolve()
    out = new_folder(options.out or store.with_name(f"{store.name}-{options.to}"), "--out")
    for line in EXPORTS[options.to](steps, out):
        if not options.json:
            print(line)
    if options.json:
        facts = {"store": options.store, "steps": _numbers(steps), "points": list(steps_with(steps))}
        print_json({**facts, "to": options.to, "out": out, "cast_to_float32": cast_points(steps)})
    return ExitCode.FINISHED


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    steps = {"store": TEXT, "steps": array(COUNT)}
    point = keyed(point=TEXT, shape=array(COUNT), dtype=TEXT)
    exported = keyed(**steps, points=array(TEXT), to=TEXT, out=TEXT, cast_to_float32=array(TEXT))
    return {"show": keyed(**steps, points=array(point)), "export": exported}
