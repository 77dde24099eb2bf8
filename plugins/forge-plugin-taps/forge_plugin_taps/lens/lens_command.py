"""`forge-run inside lens`: the predictions of each layer of a trained model."""

from __future__ import annotations

import argparse

from forge_core.cli.command_line import positive, with_examples
from forge_core.contracts.data import Tokenizer
from forge_core.contracts.errors import ExitCode
from forge_kit.tools.tables import columns
from forge_plugin_taps.lens.prompts import add_model, load, picture_path, prompt_ids, title_of, token_texts

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
    parser.add_argument("--last", type=positive, default=24, metavar="N", help="positions in the picture (24)")
    parser.add_argument("--list", action="store_true", help="list the model's points instead, by name")
    with_examples(
        parser,
        'forge-run inside lens runs/quickstart --prompt "def main("',
        "forge-run inside lens runs/quickstart/checkpoints/step-400 --prompt 'import ' --out early.png",
        "forge-run inside lens runs/quickstart --list",
    )
    options = parser.parse_args(argv)
    if options.prompt is None and not options.list:
        parser.error("give --prompt, or --list")
    return _list(options) if options.list else _show(options)


def _list(options: argparse.Namespace) -> int:
    from forge_core import load_model
    from forge_kit.nn.taps import tap_points

    trained = load_model(options.path, device=options.device, run=options.run)
    for name in tap_points(trained.model):
        print(name)
    return ExitCode.FINISHED


def _show(options: argparse.Namespace) -> int:
    from forge_plugin_taps.lens.layer_predictions import LogitLens, logit_lens
    from forge_plugin_taps.lens.pictures import draw_lens, has_glyphs

    trained, tokenizer = load(options)
    ids = prompt_ids(tokenizer, options.prompt, options)
    lens = logit_lens(trained.model, ids, options.top)
    rows = [["layer", "KL to the end", *(f"{n + 1}." for n in range(lens.top.shape[-1]))]]
    for number, name in enumerate(lens.names):
        cells = _cells(tokenizer, lens.top[number, -1].tolist(), lens.probabilities[number, -1].tolist())
        rows.append([name.removesuffix(".resid_post"), f"{lens.divergence[number, -1].item():.3f}", *cells])
    print(columns(rows))
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
    draw_lens(
        shown, [*token_texts(tokenizer, ids[first:], has_glyphs), "?"], texts, path, title_of(trained, "logit lens")
    )
    print(f"picture: {path}")
    return ExitCode.FINISHED


def _cells(tokenizer: Tokenizer, ids: list[int], probabilities: list[float]) -> list[str]:
    pairs = zip(token_texts(tokenizer, ids), probabilities, strict=True)
    # Without the backslash that protects a dollar from matplotlib
    return [f"{text.replace(chr(92), '')} {probability:.3f}" for text, probability in pairs]
