"""Run folders for tests of reports, written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

JOB = """
[job]
name = "a"
[train]
steps = 200
global_batch_size = 8
seq_len = 64
[model]
type = "forge_testing:TinyModel"
[optimizer]
type = "forge_testing:TinyAdamW"
lr = {lr}
[[data.sources]]
type = "forge_testing:Numbers"
name = "left"
weight = 3.0
[[data.sources]]
type = "forge_testing:Numbers"
name = "right"
[scheduler]
type = "forge-run/constant"
"""


def write_run(folder: Path, rows: Iterable[Mapping[str, Any]], job: str = JOB.format(lr=0.003)) -> Path:
    """Write a run folder with these lines of metrics, and return it."""
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(job)
    (folder / "provenance.json").write_text(
        json.dumps({"distributions": {"forge-run": {"version": "0.2.0"}}, "torch": "2.13.0", "python": "3.11.7"})
    )
    (folder / ".lock").touch()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def steps(count: int, **series: Any) -> list[dict[str, Any]]:
    """Lines of `count` steps, with `loss` and further series of that length."""
    series = {"loss": [4 / step**0.1 for step in range(1, count + 1)], **series}
    return [
        {
            "step": step,
            "tokens": 512 * step,
            "step_seconds": 0.5 if step <= count // 2 else 1.5,
            "time": 1.8e9 + step,
            **{name: values[step - 1] for name, values in series.items()},
        }
        for step in range(1, count + 1)
    ]


class Page(HTMLParser):
    """A page as it is parsed: its tags with attributes, its text, and whether all tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(text)
        self.close()
        self.unbalanced += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "img", "br", "wbr"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        """Attributes of every such tag."""
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def words(self) -> str:
        """All text that a reader sees."""
        return " ".join(text for tag, texts in self.texts.items() if tag not in ("style", "script") for text in texts)
