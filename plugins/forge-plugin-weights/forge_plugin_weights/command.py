"""`forge-run weights`: published models in and out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from forge_core.cli.command_line import columns
from forge_core.contracts.errors import ExitCode

PROGRAM = "forge-run weights"
DTYPES = ("float32", "bfloat16", "float16")


def command(argv: list[str]) -> int:
    """Bring published models in, and take trained ones out."""
    options = _parser().parse_args(argv)
    return int(options.action(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description=command.__doc__)
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add = partial(_add, actions)
    inspecting = add("inspect", inspect)
    inspecting.add_argument("folder", type=Path, metavar="FOLDER", help="a published model")
    importing = add("import", import_model)
    importing.add_argument("folder", type=Path, metavar="FOLDER", help="a published model")
    importing.add_argument("--output", type=Path, required=True, metavar="RUN", help="the run folder to make")
    importing.add_argument("--copy", action="store_true", help="copy the files, where they are linked otherwise")
    importing.add_argument("--no-tokenizer", action="store_true", help="leave the tokenizer out")
    exporting = add("export", export)
    exporting.add_argument("run", type=Path, metavar="RUN", help="a run folder, or a checkpoint")
    exporting.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="the folder to make")
    exporting.add_argument("--dtype", choices=DTYPES, help="of the weights; by default as they are stored")
    exporting.add_argument("--shard-size", type=float, default=5.0, metavar="GB", help="of each file (5)")
    for action in (inspecting, importing, exporting):
        action.add_argument("--architecture", default="", metavar="NAME", help="in place of the one found")
    return parser


def _add(actions: Any, name: str, function: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """Add an action whose help is the docstring of its function."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=function.__doc__, description=function.__doc__)
    parser.set_defaults(action=function)
    return parser


def inspect(options: argparse.Namespace) -> int:
    """Show what a configuration means to Forge, key by key."""
    from forge_core.plugins.catalog import Catalog
    from forge_plugin_weights.importing import CONFIG, read_json
    from forge_plugin_weights.inspecting import describe
    from forge_plugin_weights.tables import architecture_of, load_architecture

    catalog, config = Catalog.installed(), read_json(options.folder / CONFIG)
    if options.architecture:
        architecture = load_architecture(options.architecture, catalog)
    else:
        _, architecture = architecture_of(config, catalog)
    rows, supported = describe(architecture, config)
    print(columns([["KEY", "VALUE", "IN FORGE"], *rows]))
    return ExitCode.FINISHED if supported else ExitCode.BAD_JOB


def import_model(options: argparse.Namespace) -> int:
    """Make a run folder of a published model; its files are linked, not copied."""
    from forge_plugin_weights.importing import START, import_folder

    run = import_folder(
        options.folder,
        options.output,
        copy=options.copy,
        tokenizer=not options.no_tokenizer,
        architecture=options.architecture,
    )
    print(f"{run}: a run folder, with its weights as the checkpoint of step 0")
    print(f"train it: forge-run {run / START} JOB.toml")
    return ExitCode.FINISHED


def export(options: argparse.Namespace) -> int:
    """Write the weights of a run as a folder that transformers and vLLM load."""
    import torch

    from forge_plugin_weights.exporting import export_run

    folder = export_run(
        options.run,
        options.output,
        dtype=getattr(torch, options.dtype) if options.dtype else None,
        shard_bytes=round(options.shard_size * 1e9),
        architecture=options.architecture,
    )
    for path in sorted(folder.iterdir()):
        print(path)
    return ExitCode.FINISHED
