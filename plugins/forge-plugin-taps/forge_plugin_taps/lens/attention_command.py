"""`forge-run inside attention`: what the heads of a trained model attend to."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_core.cli.command_line import with_examples
from forge_core.contracts.errors import ExitCode, JobError
from forge_kit.tools.json_output import print_json
from forge_kit.tools.output_schema import COUNT, NUMBER, TEXT, Schema, array, keyed
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
    from forge_plugin_taps.lens.head_maps import AttentionMaps

MOST = 160
"""Maps in one picture."""


def numbers(text: str) -> list[int]:
    """Numbers and ranges: `0,3-5`."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"must be numbers and ranges such as 0,3-5, got {text!r}")
        if last and int(last) < int(first):
            raise argparse.ArgumentTypeError(f"{part!r} is no range: its end is before its start")
        found += range(int(first), int(last or first) + 1)
    return found


HEADING = "use"
GROUP = "Study a model."


def command(argv: list[str]) -> int:
    """Draw what the heads of a trained model attend to.

    The picture has a map of a prompt for each head; the table summarises each head. Weights are computed from queries
    and keys, separately from the kernel that runs. The model is loaded whole on one process, whatever layout it was
    trained under.
    """
    parser = argparse.ArgumentParser(prog="forge-run inside attention", description=command.__doc__)
    add_model(parser, "attention")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text that is read")
    parser.add_argument("--layers", type=numbers, metavar="LIST", help="layers, such as 0,3-5 (all)")
    parser.add_argument("--heads", type=numbers, metavar="LIST", help="heads of each (all)")
    with_examples(
        parser,
        'forge-run inside attention runs/quickstart --prompt "def main(): return main"',
        "forge-run inside attention runs/quickstart --prompt 'one two one' --layers 0-1 --heads 0",
    )
    return _show(parser.parse_args(argv))


def _show(options: argparse.Namespace) -> int:
    from forge_plugin_taps.lens.head_maps import attention_maps
    from forge_plugin_taps.lens.pictures import draw_attention, has_glyphs

    trained, tokenizer = load(options)
    ids = prompt_ids(tokenizer, options.prompt, options)
    maps = attention_maps(trained.model, ids, options.layers, options.heads)
    if (count := len(maps.layers) * len(maps.heads)) > MOST:
        raise JobError(f"{count} maps are too many for one picture, which has {MOST}; choose --layers or --heads")
    heads = list(_summaries(maps))
    if not options.json:  # before the picture, which takes longer
        print(_table(heads))
    path = picture_path(options, "attention")
    draw_attention(maps, token_texts(tokenizer, ids, has_glyphs), path, title_of(trained, "attention"))
    if options.json:
        facts = {**run_facts(options, trained), "prompt": options.prompt}
        print_json({**facts, "tokens": token_facts(tokenizer, ids), "heads": heads, "picture": path})
    else:
        print(f"picture: {path}")
    return ExitCode.FINISHED


def _summaries(maps: AttentionMaps) -> Iterator[dict[str, Any]]:
    """Yields for each head the mean entropy of its weights in nats, and the mean weights of three places."""
    for layer, weights in zip(maps.layers, maps.weights.double(), strict=True):
        for head, own in zip(maps.heads, weights, strict=True):
            # Clamped, since 0 log 0 is 0 and not NaN
            entropy = -(own * own.clamp(min=1e-30).log()).sum(-1).mean()
            # The first position has none before it, so there is one weight less than positions
            before = own.diagonal(-1).sum() / max(1, len(own) - 1)
            yield {
                "layer": layer,
                "head": head,
                "entropy": entropy.item(),
                "itself": own.diagonal().mean().item(),
                "before": before.item(),
                "first": own[:, 0].mean().item(),
            }


def _table(heads: Sequence[dict[str, Any]]) -> str:
    rows = [["layer", "head", "entropy", "itself", "the one before", "the first"]]
    for head in heads:
        figures = [f"{head[name]:.3f}" for name in ("entropy", "itself", "before", "first")]
        rows.append([head["layer"], str(head["head"]), *figures])
    return columns(rows)


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    head = keyed(layer=TEXT, head=COUNT, entropy=NUMBER, itself=NUMBER, before=NUMBER, first=NUMBER)
    return {"": keyed(**prompt_keys(), heads=array(head))}
