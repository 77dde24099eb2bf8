"""`forge-run data prepare`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.cli.command_line import positive, with_examples
from forge_kit.tools.commands import count
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, TEXT, Schema, array, by_name, keyed, maybe, one_of
from forge_kit.tools.outputs import free_folder
from forge_plugin_memmap.manifest import INPUTS, MANIFEST, PARTS, TRAIN, UNFINISHED
from forge_plugin_memmap.origins import FILE, KEPT, LINE
from forge_plugin_memmap.prepare.part_range import Part
from forge_plugin_memmap.prepare.shard_formats import FORMATS

if TYPE_CHECKING:
    from rich.console import Console

    from forge_plugin_memmap.prepare.run import Settings

KEYS = "--tokenizer."
CLUSTER = "--cluster."
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


HEADING = "start"


def command(argv: list[str]) -> int:
    """Tokenize text, JSON lines and Parquet for the dataset `memmap`.

    The output depends on the inputs and the arguments, not on the number of workers. A command that was killed
    continues where it stopped when it is given again.
    """
    options, keys = parse(argv)
    refuse_combinations(options)
    settings = read_settings(options, keys)
    if options.parts:
        return _queue(settings, options, argv)
    from rich.console import Console

    from forge_core.contracts.errors import ExitCode
    from forge_plugin_memmap.prepare.join import join
    from forge_plugin_memmap.prepare.run import prepare

    # With --json, stdout has nothing but the document
    console = Console(stderr=options.json)
    try:
        if settings.part is not None:
            _do_part(settings, settings.part, console, options.json)
            return ExitCode.FINISHED
        manifest, speed = (join if settings.join else prepare)(settings, console)
    # Needs no clean-up: the state that was saved last is complete
    except KeyboardInterrupt:
        console.print("interrupted; the same command continues where it stopped")
        return ExitCode.SECOND_SIGNAL
    if options.json:
        print_json(
            {"out": settings.output, **{key: manifest[key] for key in ("splits", "kept", "dropped", "tokenizer")}}
        )
    else:
        from forge_plugin_memmap.prepare.console import describe

        console.print(describe(settings.output, manifest, speed), highlight=False, markup=False, soft_wrap=True)
    return ExitCode.FINISHED


def _do_part(settings: Settings, part: Part, console: Console, is_json: bool) -> None:
    """Do a part, and print what it has."""
    from forge_plugin_memmap.prepare.console import describe_part
    from forge_plugin_memmap.prepare.parts import prepare_part

    record, speed = prepare_part(settings, part, console)
    if is_json:
        # Of a part that has been joined, nothing is left to count
        total = record["splits"][TRAIN]["total"] if record else dict.fromkeys(("documents", "tokens", "bytes"))
        dropped = None if record is None else {name: _in_words(entry) for name, entry in record["dropped"].items()}
        facts = {"dropped": dropped, "tokenizer": record["tokenizer"] if record else None}
        print_json({"out": settings.output, "part": str(part), **total, **facts})
    else:
        text = describe_part(settings.output, str(part), record, speed)
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _in_words(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Count and examples of what a part left out; its record has places of lines that the join is to number."""
    from forge_plugin_memmap.prepare.documents import Example

    return {"count": entry["count"], "examples": [str(Example.of(each)) for each in entry["examples"]]}


def _queue(settings: Settings, options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Have a cluster do the parts and the join."""
    from forge_core.contracts.errors import ExitCode
    from forge_kit.tools.divided_commands import cluster_of
    from forge_plugin_memmap.prepare.queued import divided

    of_cluster = [argument.removeprefix("--") for argument in argv if argument.startswith(CLUSTER)]
    cluster = cluster_of(options.on, of_cluster)
    queue = argparse.ArgumentParser(add_help=False)
    _add_queue(queue, queue)
    # All else is of the parts, as it was written
    _, words = queue.parse_known_args([argument for argument in argv if not argument.startswith(CLUSTER)])
    command = divided(settings, options.parts, words)
    if command is None:
        print(f"{settings.output} is finished, with all its parts")
    elif options.print:
        print(cluster.rendered_parts(command), end="")
    else:
        print(*cluster.submit_parts(command), sep="\n")
    return ExitCode.FINISHED


def refuse_combinations(options: argparse.Namespace) -> None:
    """Raise a `JobError` for options that would have no effect next to others."""
    from forge_core.contracts.errors import JobError

    if options.parts and not options.on:
        raise JobError("--parts N needs a cluster that does them: --on CLUSTER.toml; one part alone is --part K/N")
    for name in ("on", "print"):
        if getattr(options, name) and not options.parts:
            raise JobError(f"--{name} is about parts that a cluster does: --parts N --on CLUSTER.toml")
    if options.parts and options.json:
        raise JobError("--json prints what was written, and --parts queues what will be; leave out one of them")


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of a command line, and the keys of the tokenizer."""
    # Taken out before argparse, which does not have the options of each tokenizer
    keys = [argument.removeprefix("--") for argument in argv if argument.startswith(KEYS)]
    parser = _parser()
    options = parser.parse_args([argument for argument in argv if not argument.startswith((KEYS, CLUSTER))])
    if not options.parts and (of_cluster := [argument for argument in argv if argument.startswith(CLUSTER)]):
        parser.error(f"{of_cluster[0]} goes with --parts and --on")
    if keys and options.job:
        parser.error(f"--{keys[0]} goes with --tokenizer; with --job, the key stands in the job file")
    return options, keys


def read_settings(options: argparse.Namespace, keys: Sequence[str]) -> Settings:
    """Returns the settings of a command line; see `parse`.

    Raises:
        JobError: the inputs or the tokenizer are not as they should be; names every problem.
    """
    output = _output(options)
    # Imported after the options are parsed, so that help appears at once
    from forge_plugin_memmap.prepare.documents import Fields
    from forge_plugin_memmap.prepare.inputs import find_inputs
    from forge_plugin_memmap.prepare.run import Settings
    from forge_plugin_memmap.prepare.tokenizer import choose_tokenizer

    return Settings(
        inputs=find_inputs(options.inputs, options.field, output),
        output=output,
        tokenizer=choose_tokenizer(options.job or (), options.tokenizer, keys),
        fields=Fields(options.field, tuple(dict.fromkeys(options.keep or KEPT))),
        shard_tokens=options.shard_tokens,
        held_out_every=options.held_out_every,
        strict=options.errors == "strict",
        workers=options.workers or _cores(),
        format=options.format,
        part=options.part,
        join=options.join,
    )


def _output(options: argparse.Namespace) -> Path:
    """Returns the output folder: a new one, or one that may be continued."""
    path = Path(options.out).expanduser()
    # Parts of other commands may be at work in it
    if (path / PARTS).is_dir():
        return path
    return free_folder(path, "--out", [INPUTS, MANIFEST, UNFINISHED])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forge-run data prepare", description=command.__doc__)
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="files, folders and globs, in order: .txt, .md and .py are one "
        "document a file, .jsonl is one a line (each also .gz or .zst), .parquet is one a row, .tar is one a name "
        "(.txt, .json)")  # fmt: skip
    add("--out", required=True, metavar="DIR", help="a new folder, or an unfinished one to continue")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--tokenizer", metavar="TYPE", help="type of the tokenizer, or a tokenizer.json; its keys are "
        "given as --tokenizer.KEY=VALUE, the value as in TOML")  # fmt: skip
    which.add_argument("--job", action="append", metavar="JOB.toml", help="take the tokenizer of a job's "
        "[data.tokenizer]; several files are layered")  # fmt: skip
    add("--field", default="text", metavar="NAME", help="the key of a line, or the column, that holds the text (text)")
    add("--keep", action="append", type=kept_field, metavar="NAME", help="a key or column that is kept with each "
        "document, next to the shards; repeat it for more (id and origin)")  # fmt: skip
    shard = "tokens after which a shard ends, at the end of a document (100M)"
    add("--shard-tokens", type=token_count, default=token_count("100M"), metavar="N", help=shard)
    add("--held-out-every", type=interval, default=0, metavar="N", help="hold out every n-th document, "
        "starting with the first; 0: none (0)")  # fmt: skip
    add("--errors", choices=("strict", "skip"), default="strict", help="input that is not UTF-8, not JSON or has no "
        "text: strict stops, skip leaves it out and counts it (strict)")  # fmt: skip
    add("--format", choices=tuple(FORMATS), default="forge", help="what the shards are read by: forge, for the dataset "
        "memmap; datatrove (.ds) or megatron (.bin, .idx), for their own readers (forge)")  # fmt: skip
    add("--workers", type=count, default=0, metavar="N", help="processes that encode; 0: one a core (0)")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--part", type=Part.parse, metavar="K/N", help="do part K of N of the inputs alone, in any "
        "order or on several machines; DIR has all parts")  # fmt: skip
    parts.add_argument("--join", action="store_true", help="make the data of all parts, with the same bytes as "
        "without --part")  # fmt: skip
    _add_queue(parser, parts)
    add_json(parser, ": what was written")
    with_examples(
        parser,
        "forge-run data prepare texts/ --tokenizer bpe --tokenizer.vocab_size=32000 --out data",
        "forge-run data prepare 'web/*.jsonl.zst' --job job.toml --out data --held-out-every 1000",
        "forge-run data prepare web --job job.toml --out data --parts 64 --on slurm.toml",
    )
    return parser


def _add_queue(parser: argparse.ArgumentParser, parts: argparse._ActionsContainer) -> None:
    """Add the options of parts that a cluster does."""
    parts.add_argument("--parts", type=positive, default=0, metavar="N", help="have a cluster do all N parts that are "
        "not finished, and then the join")  # fmt: skip
    parser.add_argument("--on", metavar="CLUSTER.toml", help="with --parts: a file with the table [cluster], as of "
        "forge-run submit; its keys also as --cluster.KEY=VALUE")  # fmt: skip
    parser.add_argument("--print", action="store_true", help="with --parts: print what would be queued; nothing is "
        "written or sent")  # fmt: skip


def token_count(text: str) -> int:
    """Type of the option `--shard-tokens`."""
    match = re.fullmatch(r"(\d+)([kMG]?)", text)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; write 1000, 100k, 100M or 1G")
    return int(match[1]) * UNITS[match[2]]


def kept_field(text: str) -> str:
    """Type of the option `--keep`."""
    if text in (FILE, LINE):
        raise argparse.ArgumentTypeError(f"{text!r} is where the document lies; give the key another name")
    return text


def interval(text: str) -> int:
    """Type of the option `--held-out-every`."""
    value = int(text)
    if value < 0 or value == 1:
        raise argparse.ArgumentTypeError(f"must be 0 (off) or at least 2, not {value}")
    return value


def _cores() -> int:
    """Returns the number of cores that this process may use."""
    # `sched_getaffinity` does not exist on macOS
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    split = keyed(documents=COUNT, tokens=COUNT, bytes=COUNT, files=array(TEXT))
    dropped = by_name(keyed(count=COUNT, examples=array(TEXT)))
    tokenizer = {"type": "object"}
    whole = keyed(
        out=TEXT, splits=keyed(train=split, held_out=split), kept=by_name(COUNT), dropped=dropped, tokenizer=tokenizer
    )
    # Null once the parts are joined
    counts = {name: maybe(COUNT) for name in ("documents", "tokens", "bytes")}
    part = keyed(out=TEXT, part=TEXT, **counts, dropped=maybe(dropped), tokenizer=maybe(tokenizer))
    return {"": one_of(whole, part)}
