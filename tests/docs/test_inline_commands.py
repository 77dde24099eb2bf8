"""Commands within the sentences of pages, READMEs and skills exist, with their options and keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fences import ROOT
from inline_commands import commands_in, faults_of

OF_EXAMPLES = ("forge-run inside gradients",)
"""Commands of plugins that pages make."""


def pages() -> Iterator[Path]:
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/README.md", "plugins/forge-plugin-author/**/skills/**/*.md"):
        # These have commands as they were
        yield from (path for path in sorted(ROOT.glob(pattern)) if path.name not in ("log.md", "CHANGELOG.md"))


def test_each_command_in_a_sentence_exists() -> None:
    lines = {line: path for path in pages() for line in commands_in(path.read_text())}
    assert len(lines) > 200
    assert any("skills" in str(path) for path in lines.values())
    found = [f"{path.relative_to(ROOT)}: {fault}" for line, path in lines.items() for fault in faults_of(line)]
    assert [fault for fault in found if not any(example in fault for example in OF_EXAMPLES)] == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("forge-run shwo runs/a", "no command 'shwo"),
        ("forge-run inside lenz RUN", "no command 'inside lenz'"),
        ("forge-run inside lens RUN --pormpt a", "no option --pormpt"),
        # An option of another action
        ("forge-run checkpoints RUN diff 1 2 --keep 3", "no option --keep"),
        ("forge-run job.toml --optimizer.rate=1", "optimizer.rate"),
        ("forge-run job.toml --nprocs 2", "no option --nprocs"),
    ],
)
def test_what_does_not_exist_is_found(line: str, fault: str) -> None:
    [found] = faults_of(line)
    assert fault in found


def test_blocks_and_words_that_stand_for_something_are_left_out() -> None:
    text = "Run `forge-run data\njob.toml --step 3`.\n\n```console\n$ a `forge-run nothing`\n```\n"
    assert commands_in(text) == ["forge-run data job.toml --step 3"]
    assert not [*faults_of("forge-run COMMAND --json"), *faults_of("forge-run inside … --json")]
