"""`forge-run inside extract`: activations of a trained model over held-out sequences."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from forge_core.checkpoint.run_folder import refuse_file, storage_of
from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.contracts.errors import ExitCode, JobError
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, TEXT, Schema, keyed
from forge_kit.tools.outputs import free_folder
from forge_kit.tools.ranks import add_ranks, ranks_asked_for, run_on_ranks

EDITS = "parallel.taps.edits."


def position_count(text: str) -> int | str:
    """Type of the option `--positions`."""
    return text if text == "all" else positive(text)


HEADING = "use"


def command(argv: list[str]) -> int:
    """Write activations over held-out sequences to a store.

    They are the activations of a trained model, which is not updated. One process has the whole model; several ranks
    share it by the layout of the run, or by the stages that the command line names. The store is the same under every
    layout. Edits that the command line names are on.
    """
    parser = argparse.ArgumentParser(prog="forge-run inside extract", description=command.__doc__)
    parser.add_argument("files", nargs=1, metavar="RUN", help="a run folder (its newest checkpoint) or a checkpoint")
    parser.add_argument(
        "--points", action="append", metavar="GLOB", help="points by name; repeat it for more (layers.*.resid_post)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the store, a new one")
    parser.add_argument("--step", type=positive, metavar="N", help="checkpoint of a run folder (the newest)")
    parser.add_argument(
        "--positions",
        type=position_count,
        default="all",
        metavar="K",
        help="sampled positions of each sequence, or all (all)",
    )
    parser.add_argument("--sequences", type=positive, metavar="N", help="held-out sequences, evenly spread (all)")
    parser.add_argument(
        "--group", type=positive, default=64, metavar="N", help="sequences of each step-N in the store (64)"
    )
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="where to compute, as the key train.device (auto)"
    )
    add_ranks(parser)
    add_json(parser, ": what was written")
    with_examples(
        parser,
        "forge-run inside extract runs/quickstart --points 'layers.*.resid_post' --out acts --sequences 128",
        "forge-run inside extract runs/large --points 'layers.3.z' --positions 16 --out acts --nproc 2 "
        "--parallel.tp.degree=2",
    )
    options, files, overrides = parse_job_arguments(parser, argv)
    options.out = free_folder(options.out, "--out")  # before ranks start and load the model
    path = _checkpoint(Path(files[0]), options.step)
    return run_on_ranks("inside extract", argv, options.nproc, partial(_extract, options, path, overrides))


def _checkpoint(path: Path, step: int | None) -> Path:
    refuse_file(path)
    if not path.exists():
        raise JobError(f"{path}: no such run folder or checkpoint")
    if step is None:
        return path
    storage = storage_of(path)
    steps, checkpoint = storage.steps(), storage.path(step)
    if step not in steps:
        raise JobError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps)) or 'none'}")
    return checkpoint


def _extract(options: argparse.Namespace, path: Path, overrides: Sequence[str]) -> int:
    from forge_core import load_model
    from forge_plugin_taps.extracting import extract

    points = options.points or ["layers.*.resid_post"]
    # In place of the keys of the run's own stage; the command makes its sink itself
    keys = {"points": points, "gradients": [], "positions": options.positions, "sinks": {}}
    taps = [f"--parallel.taps.{key}={json.dumps(value)}" for key, value in keys.items()]
    named = any(word.startswith("--parallel.") for word in overrides)
    # Several ranks without stages on the command line: by the layout of the run
    own_layout = ranks_asked_for(options.nproc) > 1 and not named
    trained = load_model(path, device=options.device, parallel=own_layout, overrides=[*overrides, *taps])
    edits = {word.partition(EDITS)[2].partition(".")[0].partition("=")[0] for word in overrides if EDITS in word}
    written = extract(trained, options.out, sequences=options.sequences or 0, group=options.group, edits=sorted(edits))
    if options.json:
        loaded = {"run": options.files[0], "checkpoint": trained.checkpoint, "step": trained.step}
        print_json({**loaded, "sequences": written, "out": options.out})
    else:
        print(f"{written:,} sequences at step {trained.step:,}: {options.out}")
    return ExitCode.FINISHED


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    return {"": keyed(run=TEXT, checkpoint=TEXT, step=COUNT, sequences=COUNT, out=TEXT)}
