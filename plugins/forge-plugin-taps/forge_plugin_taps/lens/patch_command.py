"""`forge-run inside patch`: which activations carry the answer of a trained model from one prompt to another."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_core.cli.command_line import with_examples
from forge_core.contracts.data import Tokenizer
from forge_core.contracts.errors import ExitCode, JobError
from forge_kit.tools.json_output import print_json
from forge_kit.tools.output_schema import COUNT, NUMBER, TEXT, Schema, array, keyed
from forge_kit.tools.tables import columns
from forge_plugin_taps.lens.prompts import (
    add_model,
    load,
    picture_path,
    prompt_ids,
    run_facts,
    title_of,
    token_facts,
    token_text,
    token_texts,
)

if TYPE_CHECKING:
    from forge_plugin_taps.lens.patching import PatchingEffects

HEADING = "use"


def command(argv: list[str]) -> int:
    """Patch activations of a clean prompt into a corrupted one.

    Both prompts have the same number of tokens. The measure is the difference of the logits of both answers at the last
    position: by default the likeliest next token of each prompt. The picture has the effect by point and position: 1
    where the clean prompt's answer is back, 0 where nothing changes. The model is loaded whole on one process, whatever
    layout it was trained under.
    """
    parser = argparse.ArgumentParser(prog="forge-run inside patch", description=command.__doc__)
    add_model(parser, "patch")
    parser.add_argument("--clean", required=True, metavar="TEXT", help="prompt whose activations are put in")
    parser.add_argument("--corrupted", required=True, metavar="TEXT", help="prompt into which they are put")
    parser.add_argument("--answer", metavar="TEXT", help="answer to the clean prompt, one token (its likeliest)")
    parser.add_argument("--other", metavar="TEXT", help="answer to the corrupted prompt (its likeliest)")
    parser.add_argument(
        "--points",
        action="append",
        metavar="GLOB",
        help="points of which activations are put in, by name; repeat it for more (layers.*.resid_pre)",
    )
    with_examples(
        parser,
        "forge-run inside patch runs/quickstart --clean 'x = 1\\ny = x' --corrupted 'z = 1\\ny = x'",
        "forge-run inside patch runs/quickstart --clean 'ab' --corrupted 'cb' --points 'layers.*.attn_out'",
    )
    return _show(parser.parse_args(argv))


def _show(options: argparse.Namespace) -> int:
    from forge_plugin_taps.lens.layer_predictions import logit_lens
    from forge_plugin_taps.lens.patching import patching_effects
    from forge_plugin_taps.lens.pictures import draw_effects, has_glyphs

    trained, tokenizer = load(options)
    clean, corrupted = (prompt_ids(tokenizer, text, options) for text in (options.clean, options.corrupted))
    likeliest = [int(logit_lens(trained.model, ids, 1).top[-1, -1, 0]) for ids in (clean, corrupted)]
    answer = likeliest[0] if options.answer is None else _single(tokenizer, options.answer)
    other = likeliest[1] if options.other is None else _single(tokenizer, options.other)
    if answer == other:
        message = f"both answers are {token_text(tokenizer, answer)}, so nothing distinguishes the prompts"
        raise JobError(f"{message}; name them by --answer and --other")
    effects = patching_effects(
        trained.model,
        clean,
        corrupted,
        answer,
        other,
        options.points or ["layers.*.resid_pre"],
        # To stderr, as stdout may be a JSON document
        progress=lambda point: print(point, file=sys.stderr),
    )
    if not options.json:  # before the picture, which takes longer
        texts = (token_text(tokenizer, answer), token_text(tokenizer, other))
        print(f"logit({texts[0]}) - logit({texts[1]}): clean {effects.clean:.3f}, corrupted {effects.corrupted:.3f}")
        print(_table(tokenizer, effects, clean))
    inputs = (token_texts(tokenizer, ids, has_glyphs) for ids in (clean, corrupted))
    pairs = zip(*inputs, strict=True)
    labels = [one if one == two else f"{one}→{two}" for one, two in pairs]
    path = picture_path(options, "patch")
    answers = " against ".join(token_texts(tokenizer, [answer, other], has_glyphs))
    title = title_of(trained, f"patching, {answers}")
    draw_effects(effects, labels, path, title)
    if options.json:
        texts = (options.clean, options.corrupted)
        facts = _facts(tokenizer, effects, texts, (clean, corrupted), (answer, other))
        print_json({**run_facts(options, trained), **facts, "picture": path})
    else:
        print(f"picture: {path}")
    return ExitCode.FINISHED


def _table(tokenizer: Tokenizer, effects: PatchingEffects, clean: Sequence[int]) -> str:
    rows = [["point", "largest effect", "at", "token"]]
    for point, row in zip(effects.points, effects.effects, strict=True):
        place = int(row.abs().argmax())
        rows.append([point, f"{row[place].item():.3f}", str(place), token_text(tokenizer, clean[place])])
    return columns(rows)


def _facts(
    tokenizer: Tokenizer,
    effects: PatchingEffects,
    texts: Sequence[str],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[int],
) -> dict[str, Any]:
    """What table and picture show: both prompts with their measure and answer, and all effects."""
    sides = zip(("clean", "corrupted"), texts, prompts, answers, (effects.clean, effects.corrupted), strict=True)
    facts: dict[str, Any] = {
        name: {
            "prompt": text,
            "tokens": token_facts(tokenizer, ids),
            "answer": token_facts(tokenizer, [answer])[0],
            "logit_difference": measure,
        }
        for name, text, ids, answer, measure in sides
    }
    pairs = zip(effects.points, effects.effects.tolist(), strict=True)
    return {**facts, "points": [{"point": point, "effects": row} for point, row in pairs]}


def _single(tokenizer: Tokenizer, text: str) -> int:
    ids = tokenizer.encode(text)
    if len(ids) != 1:
        raise JobError(f"{text!r} is {len(ids)} tokens of this tokenizer; an answer is a single one")
    return ids[0]


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    token = keyed(id=COUNT, text=TEXT)
    side = keyed(prompt=TEXT, tokens=array(token), answer=token, logit_difference=NUMBER)
    points = array(keyed(point=TEXT, effects=array(NUMBER)))
    patched = keyed(run=TEXT, checkpoint=TEXT, step=COUNT, clean=side, corrupted=side, points=points, picture=TEXT)
    return {"": patched}
