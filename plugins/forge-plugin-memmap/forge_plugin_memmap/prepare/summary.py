"""The summary that `prepare-data` prints at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_core.cli.tables import columns
from forge_plugin_memmap.prepared import SPLITS


def describe(folder: Path, manifest: Mapping[str, Any], speed: str) -> str:
    """The summary of a finished folder.

    Args:
        speed: how long it took, and how fast it was; empty if it was finished before.
    """
    rows = [[split, *_figures(manifest["splits"][split])] for split in SPLITS if manifest["splits"][split]["files"]]
    head = ["split", "documents", "tokens", "bytes of text", "shards"]
    parts = [columns([head, *rows]), speed, _dropped(manifest), _usage(folder)]
    return "\n\n".join(filter(None, parts))


def _figures(split: Mapping[str, Any]) -> list[str]:
    return [*(f"{split[name]:,}" for name in ("documents", "tokens", "bytes")), str(len(split["files"]))]


def _dropped(manifest: Mapping[str, Any]) -> str:
    """The counts of dropped inputs, by reason."""
    dropped = manifest["dropped"]
    count = sum(entry["count"] for entry in dropped.values())
    written = sum(manifest["splits"][split]["documents"] for split in SPLITS)
    head = f"dropped {count:,} of {count + written:,} files, lines and rows"
    return "\n".join([head + (":" if count else ""), *_reasons(dropped)])


def _reasons(dropped: Mapping[str, Any]) -> Iterator[str]:
    for reason, entry in dropped.items():
        more = ", …" if entry["count"] > len(entry["examples"]) else ""
        yield f"  {reason}: {entry['count']:,}, at {', '.join(entry['examples'])}{more}"


def _usage(folder: Path) -> str:
    """How a job uses the folder."""
    tokenizer = f'[data.tokenizer]\ntype = "prepared"\npath = "{folder}"'
    source = f'[[data.sources]]\ntype = "memmap"\npath = "{folder}"'
    return f"{folder} is finished; in a job file:\n\n{tokenizer}\n\n{source}"
