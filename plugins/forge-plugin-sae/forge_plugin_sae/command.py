"""`forge-run inside sae`: sparse autoencoders on what a run has stored."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.contracts.errors import ExitCode, JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import load_component
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, NUMBER, TEXT, Schema, array, keyed, maybe
from forge_kit.tools.outputs import free_folder
from forge_kit.tools.tables import columns
from forge_plugin_sae.sae import SAE
from forge_plugin_taps import SinkComponent

if TYPE_CHECKING:
    from forge_plugin_sae.store_training import Trained

KEYS = "a key of the autoencoders: --sae.KEY=value, its value written as in TOML"
TABLE = '[sae]\ntype = "sae"\n'


HEADING = "use"


def command(argv: list[str]) -> int:
    """Train sparse autoencoders on stored activations.

    The command trains transcoders as well. The quality of both is measured on held-out sequences.
    """
    parser = argparse.ArgumentParser("forge-run inside sae", description=command.__doc__)
    parser.add_argument("run", metavar="RUN", help="a run, or a store, with samples of activations")
    parser.add_argument("files", nargs="*", metavar="SAE.toml", help="files with a table [sae], with keys of the sink")
    parser.add_argument("--epochs", type=positive, default=1, metavar="N", help="passes over the samples (1)")
    parser.add_argument(
        "--held-out", type=share, default=0.1, metavar="SHARE", help="share of sequences to measure on only (0.1)"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write; by default RUN/sae, by sae.folder")
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="where to train, as the key train.device (auto)"
    )
    add_json(parser, " in place of the table")
    with_examples(
        parser,
        "forge-run inside sae runs/small --sae.latents=512 --sae.activation.k=16",
        "forge-run inside sae runs/small/taps sae.toml --epochs 4 --out saes",
    )
    options, files, overrides = parse_job_arguments(parser, argv, keys=KEYS)
    settings = _settings(files, overrides)
    # Before torch is imported and training begins: a folder that is taken is found at once
    out = options.out and free_folder(options.out, "--out")
    from forge_plugin_sae.store_training import Samples, train  # imports torch

    samples = Samples.of(Path(options.run))
    out = out or free_folder(samples.folder.parent / settings.folder, "sae.folder")
    trained = train(settings, samples, options.epochs, options.held_out, options.device, out)
    rows = [_row(each) for each in trained]
    if options.json:
        print_json({"samples": samples.folder, "out": out, "points": rows})
    else:
        print(_table(rows))
        print(f"written to {out}")
    return ExitCode.FINISHED


def _settings(files: Sequence[str], overrides: Sequence[str]) -> SAE:
    component = load_component("sae", SinkComponent, Catalog.installed(), [TABLE, *files], overrides)
    if not isinstance(component, SAE):
        raise JobError(f"[sae] is of type {type(component).__name__}; leave out its key type")
    if problems := list(component.setting_problems()):
        raise JobError([problem.below("sae") for problem in problems])
    return component


def share(text: str) -> float:
    """Type of the option `--held-out`."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("must be at least 0 and below 1")
    return value


def _row(trained: Trained) -> dict[str, Any]:
    """The figures of an autoencoder; None for held-out samples where nothing was held out."""
    counts = {name: getattr(trained, name) for name in ("point", "latents", "rows", "updates", "dead")}
    return counts | {name: trained.figures.get(name) for name in ("explained_variance", "l0")}


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells: list[Sequence[str]] = [("point", "latents", "rows", "updates", "explained variance", "L0", "dead")]
    for row in rows:
        counts = [str(row[name]) for name in ("point", "latents", "rows", "updates")]
        figures = ["nan" if row[name] is None else f"{row[name]:.4g}" for name in ("explained_variance", "l0")]
        cells.append((*counts, *figures, f"{row['dead']} of {row['latents']}"))
    return columns(cells)


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    counts = dict.fromkeys(("latents", "rows", "updates", "dead"), COUNT)
    point = keyed(point=TEXT, **counts, explained_variance=maybe(NUMBER), l0=maybe(NUMBER))
    return {"": keyed(samples=TEXT, out=TEXT, points=array(point))}
