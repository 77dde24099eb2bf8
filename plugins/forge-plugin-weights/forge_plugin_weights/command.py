"""`forge-run weights`: published models in and out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.cli.command_line import positive, with_examples
from forge_core.contracts.errors import ExitCode, JobError
from forge_kit.tools.commands import gigabytes
from forge_kit.tools.json_output import add_json, json_text, print_json
from forge_kit.tools.output_schema import (
    ANYTHING,
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    Schema,
    array,
    by_name,
    keyed,
    maybe,
    of,
    one_of,
    with_keys,
)
from forge_kit.tools.outputs import MARK, free_path, output_file, write_output
from forge_kit.tools.tables import columns

if TYPE_CHECKING:
    from forge_core.plugins.catalog import Catalog
    from forge_plugin_weights.kinds import ArchitectureComponent, Config

PROGRAM = "forge-run weights"
SHOWN = 20
"""Tensors that `verify` lists."""
PUBLISHED = "a folder with a published model, a GGUF file, or ORG/NAME on the Hugging Face hub"
DTYPES = ("float32", "bfloat16", "float16")


HEADING = "use"


def command(argv: list[str]) -> int:
    """Import and export models: Hugging Face, vLLM, GGUF, PEFT."""
    options = _parser().parse_args(argv)
    return int(options.action(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description=command.__doc__)
    with_examples(
        parser,
        "forge-run weights import Qwen3-0.6B --out runs/qwen3",
        "forge-run weights export runs/qwen3 --out exported --dtype bfloat16",
        "forge-run weights verify Qwen3-0.6B exported",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, help="what to do")
    add = partial(_add, actions)
    inspecting = add("inspect", inspect)
    inspecting.add_argument("folder", type=Path, metavar="MODEL", help=PUBLISHED)
    importing = add("import", import_model)
    importing.add_argument("folder", type=Path, metavar="MODEL", help=PUBLISHED)
    importing.add_argument("--out", type=Path, required=True, metavar="RUN", help="the run folder to make")
    importing.add_argument("--copy", action="store_true", help="copy the files, where they are linked otherwise")
    tokenizers = importing.add_mutually_exclusive_group()
    tokenizers.add_argument("--no-tokenizer", action="store_true", help="leave the tokenizer out")
    tokenizers.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="with the tokenizer's files, in place of the model's own"
    )
    exporting = add("export", export)
    exporting.add_argument("run", type=Path, metavar="RUN", help="a run folder, or a checkpoint")
    exporting.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="the folder to make, or a file X.gguf"
    )
    exporting.add_argument("--dtype", choices=DTYPES, help="of the weights; by default as they are stored")
    exporting.add_argument("--shard-size", type=gigabytes, metavar="GB", help="of each file (5)")
    exporting.add_argument("--no-tokenizer", action="store_true", help="of X.gguf: leave the tokenizer out")
    exporting.add_argument("--verify", action="store_true", help="also compare what checkpoint and export compute")
    exporting.add_argument(
        "--push", default="", metavar="ORG/NAME", help="also upload it to this repository of the hub"
    )
    exporting.add_argument("--public", action="store_true", help="a repository that --push makes is public")
    adapters = exporting.add_mutually_exclusive_group()
    adapters.add_argument("--merge", action="store_true", help="add adapters to the weights")
    adapters.add_argument("--adapters", action="store_true", help="write adapters alone, in the format of peft")
    verifying = add("verify", verify)
    verifying.add_argument("first", type=Path, metavar="A", help="a published model, a run folder or a checkpoint")
    verifying.add_argument("second", type=Path, metavar="B", help="likewise")
    inputs = verifying.add_mutually_exclusive_group()
    inputs.add_argument("--tokens", type=positive, default=256, metavar="N", help="random tokens to compute (256)")
    inputs.add_argument("--prompts", type=Path, metavar="FILE", help="texts to compute in their place, one a line")
    verifying.add_argument("--report", type=Path, metavar="FILE", help="also write everything to a JSON file")
    for action in (inspecting, importing, exporting, verifying):
        add_json(action)
        action.add_argument(
            "--architecture", default="", metavar="NAME", help="of the model, in place of the one that its files name"
        )
    for action in (inspecting, importing):
        action.add_argument("--revision", default="", metavar="REV", help="of a name on the hub: branch, tag or commit")
    for action in (inspecting, importing, verifying):
        action.add_argument(
            "--ignore",
            action="append",
            default=[],
            metavar="KEY",
            help="a key of config.json that Forge does not know, and that means nothing; may be given several times",
        )
    return parser


def _add(actions: Any, name: str, function: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """Add an action whose help is the docstring of its function."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=function.__doc__, description=function.__doc__, allow_abbrev=False
    )
    parser.set_defaults(action=function)
    return parser


def inspect(options: argparse.Namespace) -> int:
    """Show what a configuration means to Forge, key by key."""
    # Imported by the actions, so that --help needs no torch
    from forge_core.plugins.catalog import Catalog
    from forge_plugin_weights.importing import read_folder
    from forge_plugin_weights.inspecting import describe, describe_images, without

    catalog, config = Catalog.installed(), read_folder(_folder(options, weights=False))
    architecture = _architecture(config, options.architecture, catalog)
    config = without(architecture, config, options.ignore)
    rows, supported = describe(architecture, config)
    rows += [[key, "", "ignored: --ignore"] for key in options.ignore]
    images = list(describe_images(architecture, config))
    if options.json:
        keys = [dict(zip(("key", "value", "in_forge"), row, strict=True)) for row in rows]
        print_json({"supported": supported, "keys": keys, "images": images})
    else:
        print("\n".join([columns([["KEY", "VALUE", "IN FORGE"], *rows]), *images]))
    return ExitCode.FINISHED if supported else ExitCode.BAD_JOB


def _folder(options: argparse.Namespace, *, weights: bool = True) -> Path:
    """Returns the folder of a published model, which is fetched if it is a name on the hub."""
    from forge_plugin_weights.hub import fetched, is_name

    path: Path = options.folder
    if is_name(path):
        return fetched(str(path), options.revision, weights=weights)
    if options.revision:
        raise JobError(f"--revision {options.revision} is of a name on the hub, and {path} is none; leave it out")
    return path


def _architecture(config: Config, chosen: str, catalog: Catalog) -> ArchitectureComponent:
    """Returns the architecture that the user chose by name, or else the configuration's architecture."""
    from forge_plugin_weights.scorers import is_scorer, scorer
    from forge_plugin_weights.tables import architecture_of, load_architecture

    architecture = load_architecture(chosen, catalog) if chosen else architecture_of(config, catalog)[1]
    return scorer(architecture) if is_scorer(config) else architecture


def import_model(options: argparse.Namespace) -> int:
    """Make a run folder of a published model; its files are linked, not copied."""
    from forge_core.plugins.catalog import Catalog
    from forge_plugin_weights.downloads import checksum_line
    from forge_plugin_weights.gguf_files import is_gguf
    from forge_plugin_weights.importing import IGNORED, LEFT_OUT, ORIGIN, START, import_folder, read_folder, read_json
    from forge_plugin_weights.inspecting import remarks
    from forge_plugin_weights.matching import listed

    catalog, out = Catalog.installed(), free_path(options.out, "--out")  # refused before a long download
    folder = _folder(options)
    run = import_folder(
        folder,
        out,
        copy=options.copy,
        tokenizer=_tokenizer(options),
        architecture=options.architecture,
        ignore=options.ignore,
        catalog=catalog,
    )
    origin = read_json(run / ORIGIN)
    config = origin["config"] if is_gguf(folder) else read_folder(folder)
    notes = [f"{key} = {value!r} of config.json is ignored" for key, value in origin[IGNORED].items()]
    notes += list(remarks(_architecture(config, options.architecture, catalog), config))
    if options.json:
        facts = {name: origin[name] for name in ("model_type", "files", "digests", LEFT_OUT, IGNORED)}
        print_json({"run": run, "start": run / START, "notes": notes, **facts})
        return ExitCode.FINISHED
    for note in notes:
        print(f"note: {note}")
    print(f"{run}: a run folder, with its weights as the checkpoint of step 0")
    print(checksum_line(origin["digests"]))
    if origin[LEFT_OUT]:
        print(f"left out, as Forge computes nothing with them: {listed(origin[LEFT_OUT])}")
    print(f"train it: forge-run {run / START} JOB.toml")
    return ExitCode.FINISHED


def _tokenizer(options: argparse.Namespace) -> bool | Path:
    """Returns whether to take the tokenizer, or the folder that was named with its files."""
    if options.tokenizer is None:
        return not options.no_tokenizer
    folder: Path = options.tokenizer.expanduser()
    if not folder.is_dir():
        raise JobError(f"--tokenizer {folder}: there is no such folder")
    return folder


def verify(options: argparse.Namespace) -> int:
    """Compare two models: their tensors, and what they compute, with a layer of each in memory at a time."""
    import attrs

    from forge_core.plugins.catalog import Catalog
    from forge_plugin_weights.verifying import (
        compare_features,
        compare_logits,
        compare_tensors,
        model_changes,
        open_side,
        random_batch,
        text_batch,
    )

    if options.report is not None:
        options.report = output_file(options.report, "--report")  # refused before a long comparison
    catalog = Catalog.installed()
    sides = options.first, options.second
    ignored = [_there(path, options.ignore) for path in sides]  # an export lacks what was ignored at the import
    if missing := [key for key in options.ignore if not any(key in keys for keys in ignored)]:
        raise JobError(f"--ignore {missing[0]}: no config.json of the two has such a key")
    one, other = (
        open_side(path, catalog, options.architecture, keys) for path, keys in zip(sides, ignored, strict=True)
    )
    # First: an error of the user's files is found at once, while comparing all tensors may take long.
    prompts = text_batch(options.prompts, (one, other)) if options.prompts else None
    tensors = list(compare_tensors(one, other))
    changes = model_changes(one, other, catalog)
    has_text = "embedding.weight" in one.shapes  # a vision tower alone has none
    if has_text:
        batch, real = prompts or (random_batch(one, options.tokens), None)
        count = options.tokens if real is None else int(real.sum())
        logits = compare_logits(one, other, batch, catalog, real)
        computed, lines = attrs.asdict(logits), list(logits.lines(count))
    else:
        features = compare_features(one, other, catalog)
        computed, lines = (
            {"features": features},
            [f"features of an image: they differ by {features:.3g} of the largest"],
        )
    unequal = [tensor for tensor in tensors if not tensor.equal]
    # Computed differences do not count: they follow from the tensors, or are due to rounding.
    code = ExitCode.FINISHED if not unequal and not changes else ExitCode.FAILED
    report = {"model": changes, "tensors": [*map(attrs.asdict, tensors)], "computed": computed}
    if options.report:
        write_output(options.report, "--report", json_text({"generator": MARK, **report}, indent=1) + "\n")
    if options.json:
        print_json(report)
        return code
    for line in changes:
        print(line)
    print(f"tensors: {len(tensors) - len(unequal)} equal, {len(unequal)} with other values")
    for tensor in sorted(unequal, key=lambda tensor: -tensor.largest)[:SHOWN]:
        print(f"  {tensor.name}: {tensor.largest:.3g} of the largest number")
    for line in lines:
        print(line)
    return code


def _there(path: Path, keys: Collection[str]) -> Collection[str]:
    """Returns the keys that the `config.json` of a folder has, in whichever of its tables."""
    from forge_plugin_weights.importing import CONFIG, read_json
    from forge_plugin_weights.tables import flattened

    names = flattened(read_json(path / CONFIG)) if (path / CONFIG).is_file() else {}
    return [key for key in keys if any(f".{key}." in f".{name}." for name in names)]


def export(options: argparse.Namespace) -> int:
    """Write the weights of a run as a folder that transformers and vLLM load."""
    import torch

    from forge_plugin_weights.adapters import MERGING
    from forge_plugin_weights.exporting import PROVENANCE, SHARD_BYTES, export_run
    from forge_plugin_weights.gguf_files import is_gguf
    from forge_plugin_weights.hub import check_pushable
    from forge_plugin_weights.importing import read_json
    from forge_plugin_weights.parity import PARITY

    gguf = is_gguf(options.out)
    if gguf:
        _check_gguf(options)
    elif options.no_tokenizer:
        raise JobError("--no-tokenizer is of an export to X.gguf; leave it out")
    if options.public and not options.push:
        raise JobError("--public is of a repository that --push makes; add it, or leave --public out")
    if options.push:
        check_pushable(options.push)  # before an export that may take long
    if options.adapters:
        return _export_adapters(options)
    out = export_run(
        options.run,
        options.out,
        dtype=getattr(torch, options.dtype) if options.dtype else None,
        shard_bytes=options.shard_size or SHARD_BYTES,
        architecture=options.architecture,
        computed=options.verify,
        merge=options.merge,
        tokenizer=not options.no_tokenizer,
    )
    if gguf:
        if options.json:
            print_json({"out": out, "files": [out.name]})
        else:
            print(out)
        return ExitCode.FINISHED
    folder = out
    paths = sorted(folder.iterdir())
    merging = read_json(folder / PROVENANCE / MERGING) if options.merge else None
    if options.json:
        parity = read_json(folder / PROVENANCE / PARITY)
        facts = {"out": folder, "files": [path.name for path in paths], "parity": parity, **_pushed(options, folder)}
        print_json(facts if merging is None else {**facts, "merging": merging})
        return ExitCode.FINISHED
    for path in paths:
        print(path)
    if merging is not None:
        lost = f"rounding took {merging['lost']:.2%} of the update of {merging['name']}, and less of the others"
        what = lost if merging["lost"] else "nothing was lost by rounding"
        print(f"adapters added to {merging['matrices']} matrices; {what}")
    _print_pushed(options, folder)
    return ExitCode.FINISHED


def _check_gguf(options: argparse.Namespace) -> None:
    """Refuse options that a single file has no use for."""
    reasons = {
        "--push": (options.push, "uploads a folder"),
        "--adapters": (options.adapters, "writes a folder for peft"),
        "--shard-size": (options.shard_size, "is of several files"),
        "--verify": (options.verify, f"compares a folder; afterwards: forge-run weights verify RUN {options.out}"),
    }
    for name, (given, reason) in reasons.items():
        if given:
            raise JobError(f"{name} {reason}; leave it out with --out {options.out}")


def _pushed(options: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Upload an export if `--push` is given; returns the address."""
    from forge_plugin_weights.hub import push

    return {"pushed": push(folder, options.push, public=options.public)} if options.push else {}


def _print_pushed(options: argparse.Namespace, folder: Path) -> None:
    for address in _pushed(options, folder).values():
        print(f"pushed to {address}")


def _export_adapters(options: argparse.Namespace) -> int:
    from forge_plugin_weights.exporting import export_adapters

    ignored = {"--dtype": options.dtype, "--verify": options.verify}
    if given := [name for name, value in ignored.items() if value]:
        raise JobError(f"{given[0]} is about weights, which --adapters leaves out; take one of them")
    folder = export_adapters(options.run, options.out, architecture=options.architecture)
    paths = sorted(folder.iterdir())
    if options.json:
        print_json({"out": folder, "files": [path.name for path in paths], **_pushed(options, folder)})
        return ExitCode.FINISHED
    for path in paths:
        print(path)
    _print_pushed(options, folder)
    return ExitCode.FINISHED


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    from forge_plugin_weights.verifying import LogitDifference, TensorDifference

    computed = of(LogitDifference)
    tensors = keyed(equal=COUNT, rounded=by_name(NUMBER))
    parity = keyed(tensors=tensors, model=array(TEXT), computed=maybe(computed), versions=by_name(TEXT))
    # The first two of an export to a single file or of adapters; `pushed` and `merging` by their options
    exported = with_keys(
        keyed(out=TEXT, files=array(TEXT)),
        parity=parity,
        pushed=TEXT,
        merging=keyed(matrices=COUNT, lost=NUMBER, name=TEXT),
    )
    compared = {"model": array(TEXT), "tensors": array(of(TensorDifference))}
    return {
        "inspect": keyed(supported=FLAG, keys=array(keyed(key=TEXT, value=TEXT, in_forge=TEXT)), images=array(TEXT)),
        "import": keyed(
            run=TEXT,
            start=TEXT,
            notes=array(TEXT),
            model_type=TEXT,
            files=by_name(TEXT),
            digests=by_name(maybe(TEXT)),
            left_out=array(TEXT),
            ignored=by_name(ANYTHING),
        ),
        "export": exported,
        "verify": keyed(**compared, computed=one_of(computed, keyed(features=NUMBER))),
    }
