"""`forge-run inside lens`: the predictions of each layer of a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forge_core.cli.command_line import positive, with_examples
from forge_core.contracts.data import Tokenizer
from forge_core.contracts.errors import ExitCode
from forge_kit.tools.json_output import print_json
from forge_kit.tools.output_schema import COUNT, NUMBER, TEXT, Schema, array, keyed, one_of
from forge_kit.tools.tables import columns
from forge_plugin_taps.lens.prompts import (
    add_model,
    load,
    picture_path,
    prompt_ids,
    prompt_keys,
    run_facts,
    title_of,
    token_facts,
    token_texts,
)

if TYPE_CHECKING:
    from forge_plugin_taps.lens.layer_predictions import LogitLens

HEADING = "use"


def command(argv: list[str]) -> int:
    """Show what each layer of a trained model would predict next.

    This is the logit lens: the residual stream after each layer goes through the final norm and the head. The table is
    of the last position of the prompt, the picture of the last positions. The model is loaded whole on one process,
    whatever layout it was trained under.
    """
    parser = argparse.ArgumentParser(prog="forge-run inside lens", description=command.__doc__)
    add_model(parser, "lens")
    parser.add_argument("--prompt", metavar="TEXT", help="text whose next tokens are predicted")
    parser.add_argument("--top", type=positive, default=5, metavar="N", help="likeliest tokens in the table (5)")
    parser.add_argument(
        "--last", type=positive, default=24, metavar="N", help="positions in the picture and in JSON (24)"
    )
    parser.add_argument("--list", action="store_true", help="list the model's points instead, by name")
    with_examples(
        parser,
        'forge-run inside lens runs/quickstart --prompt "def main("',
        "forge-run inside lens runs/quickstart/checkpoints/step-1500 --prompt 'import ' --out early.png",
        "forge-run inside lens runs/quickstart --list",
    )
    options = parser.parse_args(argv)
    if options.prompt is None and not options.list:
        parser.error("give --prompt, or --list")
    if options.list and (options.prompt is not None or options.out is not None):
        parser.error("--list only lists points, without a prompt and a picture: leave out --prompt and --out")
    return _list(options) if options.list else _show(options)


def _list(options: argparse.Namespace) -> int:
    from forge_core import load_model
    from forge_kit.nn.taps import tap_points

    trained = load_model(options.path, device=options.device, run=options.run)
    names = list(tap_points(trained.model))
    if options.json:
        print_json({**run_facts(options, trained), "points": names})
        return ExitCode.FINISHED
    for name in names:
        print(name)
    return ExitCode.FINISHED


def _show(options: argparse.Namespace) -> int:
    from forge_plugin_taps.lens.layer_predictions import LogitLens, logit_lens
    from forge_plugin_taps.lens.pictures import draw_lens, has_glyphs

    trained, tokenizer = load(options)
    ids = prompt_ids(tokenizer, options.prompt, options)
    lens = logit_lens(trained.model, ids, options.top)
    first = max(0, len(ids) - options.last)
    shown = LogitLens(
        lens.names,
        lens.top[:, first:],
        lens.probabilities[:, first:],
        lens.entropy[:, first:],
        lens.divergence[:, first:],
    )
    texts = [token_texts(tokenizer, row, has_glyphs) for row in shown.top[..., 0].tolist()]
    path = picture_path(options, "lens")
    if not options.json:  # before the picture, which takes longer
        print(_table(tokenizer, lens))
    draw_lens(
        shown, [*token_texts(tokenizer, ids[first:], has_glyphs), "?"], texts, path, title_of(trained, "logit lens")
    )
    if options.json:
        facts = {**run_facts(options, trained), "prompt": options.prompt}
        print_json({**facts, **_facts(tokenizer, shown, ids, first), "picture": path})
    else:
        print(f"picture: {path}")
    return ExitCode.FINISHED


def _table(tokenizer: Tokenizer, lens: LogitLens) -> str:
    rows = [["layer", "KL to the end", *(f"{n + 1}." for n in range(lens.top.shape[-1]))]]
    for number, name in enumerate(lens.names):
        cells = _cells(tokenizer, lens.top[number, -1].tolist(), lens.probabilities[number, -1].tolist())
        rows.append([name.removesuffix(".resid_post"), f"{lens.divergence[number, -1].item():.3f}", *cells])
    return columns(rows)


def _facts(tokenizer: Tokenizer, shown: LogitLens, ids: list[int], first: int) -> dict[str, Any]:
    """What table and picture show: `tokens`, and for each layer the predictions after each of the last positions."""
    layers = []
    for number, name in enumerate(shown.names):
        positions = []
        for place in range(len(ids) - first):
            tokens = token_facts(tokenizer, shown.top[number, place].tolist())
            shares = shown.probabilities[number, place].tolist()
            positions.append(
                {
                    "position": first + place,
                    "divergence": shown.divergence[number, place].item(),
                    "entropy": shown.entropy[number, place].item(),
                    "top": [token | {"probability": share} for token, share in zip(tokens, shares, strict=True)],
                }
            )
        layers.append({"point": name, "positions": positions})
    return {"tokens": token_facts(tokenizer, ids), "layers": layers}


def _cells(tokenizer: Tokenizer, ids: list[int], probabilities: list[float]) -> list[str]:
    pairs = zip(token_texts(tokenizer, ids), probabilities, strict=True)
    # Without the backslash that protects a dollar from matplotlib
    return [f"{text.replace(chr(92), '')} {probability:.3f}" for text, probability in pairs]


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    likely = keyed(id=COUNT, text=TEXT, probability=NUMBER)
    position = keyed(position=COUNT, divergence=NUMBER, entropy=NUMBER, top=array(likely))
    layers = array(keyed(point=TEXT, positions=array(position)))
    points = keyed(run=TEXT, checkpoint=TEXT, step=COUNT, points=array(TEXT))
    return {"": one_of(keyed(**prompt_keys(), layers=layers), points)}
