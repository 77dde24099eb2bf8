"""The pages, read as what they promise: files, jobs, and commands with what they print.

A fenced block with a `title` is a file of that name, in a folder that a page has to itself. A `console` block shows
commands and, to the letter, what they print in that folder; `…` stands for anything. Commands that only look, such as
`$ forge-run check job.toml`, are run and compared, others are only shown; but on `RUN_ALL`, where jobs train in a
moment, all are run. `python tests/docs/fences.py` writes into the pages what they print today, but for
blocks with `…`; given some pages, into these.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from attrs import frozen

from forge_core.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "forge-plugin-signsgd"
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "examples" not in path.parts),
    EXAMPLE / "README.md",
    *sorted((ROOT / "plugins").glob("*/README.md")),
]

NEED_EXAMPLE = (ROOT / "docs" / "writing-a-plugin.md", ROOT / "docs" / "testing.md", EXAMPLE / "README.md")
"""Pages on which the example plugin is installed."""

TEN_MINUTES = ROOT / "docs" / "ten-minutes"
IMAGES = ROOT / "docs" / "your-own-images.md"
VIDEOS = ROOT / "docs" / "your-own-videos.md"
EVALUATES = ROOT / "docs" / "evaluate.md"
IMPORTS = ROOT / "docs" / "bring-a-model.md"
"""The page whose commands make the model of its job."""
CONTINUES = ROOT / "docs" / "how-to" / "continue-a-published-vlm.md"
"""Likewise, and the data too: its job, which is none without them, is fenced as `ini`."""
LORA = ROOT / "docs" / "how-to" / "lora.md"
"""Likewise: its second and third job load what the commands make."""
ARCHITECTURE = ROOT / "docs" / "how-to" / "architecture.md"
TUTORIAL = ROOT / "docs" / "tutorials" / "own-text.md"
COOKBOOK = ROOT / "docs" / "cookbook.md"
METRICS = ROOT / "docs" / "how-to" / "metrics.md"
LOGGERS = ROOT / "docs" / "how-to" / "loggers.md"
LADDER = ROOT / "docs" / "how-to" / "ladder.md"
TRANSFER = ROOT / "docs" / "how-to" / "transfer-hyperparameters.md"
TAPS = ROOT / "docs" / "how-to" / "taps.md"
STATS = ROOT / "docs" / "how-to" / "training-stats.md"
PREFERENCES = ROOT / "docs" / "how-to" / "preferences.md"
REWARDS = ROOT / "docs" / "how-to" / "reinforcement-learning.md"
SFT = ROOT / "docs" / "how-to" / "sft.md"
ASSISTANTS = ROOT / "docs" / "how-to" / "assistants.md"
PARTS = ROOT / "docs" / "how-to" / "more-than-one-machine.md"
CLEANS = ROOT / "docs" / "how-to" / "clean-documents.md"
EVALUATES_VISION = ROOT / "docs" / "how-to" / "evaluate-vision.md"
TOKENS = ROOT / "docs" / "how-to" / "tokens-you-already-have.md"
TRACE = ROOT / "docs" / "how-to" / "trace-a-token.md"
MAKE_DATA = (IMAGES, VIDEOS, EVALUATES_VISION, TUTORIAL, COOKBOOK, PREFERENCES, REWARDS, SFT, PARTS, TOKENS, TRACE)
"""Pages whose commands make the data of their jobs."""
RUN_ALL = (
    *sorted(TEN_MINUTES.glob("*.md")),
    *(ROOT / "docs" / "publishing.md", IMAGES, VIDEOS, EVALUATES, IMPORTS, TUTORIAL, METRICS, LOGGERS, TAPS, STATS),
    *(EVALUATES_VISION, CONTINUES, PREFERENCES, REWARDS, LORA, SFT, ARCHITECTURE, LADDER, TRANSFER, PARTS, TOKENS),
    *(TRACE, ASSISTANTS, CLEANS),
)
"""Pages of which every command is run."""

TRAINS = re.compile(r"forge-run( \S+\.toml)+$")
SCRIPT = re.compile(r"python (\w+\.py)$")
"""Such commands are run in this process: a new one would spend most of its time on importing torch."""

LOOKS = re.compile(r"forge-run (check|explain|plan|new-plugin|plugins|submit(?=.* --print)|--help|--version)\b")
"""Commands that take a moment, or half a minute, and change nothing but that they write new files."""

PLANS = re.compile(r"forge-run plan configs/\S+\.toml( --\S+[= ]\S+)*")
"""Plans of shipped jobs, which are the same on every page."""

SHELL = "|&;<>*$`(){}#~"
"""Characters for which a command needs a shell, unless they are between quotes."""
QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\\\]*\"")
"""What a shell passes on as it stands."""

PLAIN = re.compile(r"(?P<variables>(?:\w+=\S+ )*)forge-run (?P<arguments>.*)")
"""What is started without one, as other processes of tests are: see `tests/forked_starts.py`."""

FENCE = re.compile(r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)
INCLUDE = re.compile(r"^--8<--\n(?P<path>.+)\n--8<--\n", re.MULTILINE)
REQUIRED = {"train", "model", "data", "optimizer"}
BROKEN = "broken.toml"
"""Title of a job that is wrong on purpose."""


@frozen
class Fence:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def table(self) -> dict[str, Any]:
        """What a `toml` block says."""
        try:
            return tomllib.loads(self.text)
        except tomllib.TOMLDecodeError as error:
            raise AssertionError(f"{self} is not TOML: {error}") from error

    @property
    def is_job(self) -> bool:
        """Whether a `toml` block is a job or a part of one, and not a pyproject.toml."""
        return self.language == "toml" and self.title != BROKEN and not self.table.keys() & {"project", "build-system"}

    @property
    def is_whole_job(self) -> bool:
        return self.is_job and self.table.keys() >= REQUIRED

    @property
    def ranks(self) -> int:
        """How many processes a job is for: the product of the degrees that it gives."""
        stages = self.table.get("parallel", {}).values()
        degrees = (stage.get(key) for stage in stages for key in ("degree", "replicate", "shard"))
        return math.prod(degree for degree in degrees if isinstance(degree, int))

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Commands of a `console` block that are to be run, each with what the page shows."""
        if self.language != "console":
            return []
        shown = re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]
        pairs = [(command, output) for command, _, output in (part.partition("\n") for part in shown)]
        return pairs if self.page in RUN_ALL or all(LOOKS.match(command) for command, _ in pairs) else []


def fences(page: Path) -> Iterator[Fence]:
    """The fenced blocks of a page, with included files in place."""
    source = page.read_text()
    for match in FENCE.finditer(source):
        text = INCLUDE.sub(lambda include: (ROOT / include["path"]).read_text(), match["text"])
        line = source.count("\n", 0, match.start()) + 1
        yield Fence(page, line, match["language"], match["title"] or "", text)


ALL = [fence for page in PAGES for fence in fences(page)]


def write_files(blocks: Sequence[Fence], folder: Path) -> None:
    """Write the titled blocks of a page into `folder`, beside the repository's `configs`."""
    for block in blocks:
        if block.title:
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    shutil.copytree(ROOT / "configs", folder / "configs", dirs_exist_ok=True)


def install_example(target: Path) -> Path:
    """Install the example plugin into a folder, which takes effect as PYTHONPATH; the environment stays as it is."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(EXAMPLE)], check=True)
    return target


def printed(command: str, folder: Path, installed: Path | None = None) -> str:
    """What a command prints in `folder`, errors included. `installed`: further packages (see `install_example`)."""
    first, *rest = re.split(r"; (?=forge-run )", command)
    if rest:
        return "\n".join(filter(None, (printed(part, folder, installed) for part in (first, *rest))))
    if PLANS.fullmatch(command) and folder != ROOT:
        return _plan(command)
    if TRAINS.match(command):
        return _here(folder, lambda: main(shlex.split(command)[1:]))
    if script := SCRIPT.match(command):
        return _here(folder, lambda: runpy.run_path(script[1], run_name="__main__"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "COLUMNS": "100"} | ({"PYTHONPATH": str(installed)} if installed else {})
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"  # no notice of a newer pip, which pages do not show
    forge_run: list[str] = []
    if (match := PLAIN.fullmatch(command)) and not set(QUOTED.sub("", command)) & set(SHELL):
        environment |= dict(variable.split("=", 1) for variable in match["variables"].split())
        forge_run = [sys.executable, "-m", "forge_core", *shlex.split(match["arguments"])]
    done = subprocess.run(
        forge_run or ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout.rstrip("\n")


@cache
def _plan(command: str) -> str:
    return printed(command, ROOT)


def _here(folder: Path, run: Callable[[], Any]) -> str:
    """What a function prints in this process, with `folder` as the working directory and first on the path."""
    output = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        sys.path.insert(0, str(folder))
        try:
            run()
        finally:
            sys.path.remove(str(folder))
    return output.getvalue().rstrip("\n")


def agrees(shown: str, real: str) -> bool:
    """Whether a page shows what was really printed, but for the lines it leaves out."""
    pattern = ".*".join(map(re.escape, shown.strip("\n").split("…")))
    return re.fullmatch(pattern, real.strip("\n"), re.DOTALL) is not None


def _refresh(page: Path, installed: Path | None) -> None:
    """Write into a page what its commands print today."""
    text, blocks = page.read_text(), list(fences(page))
    with tempfile.TemporaryDirectory() as folder:
        write_files(blocks, Path(folder))
        for block in blocks:
            leaves_out = "…" in block.text
            # Where all commands of a page run, a later one may read what an earlier one has made
            if block.commands and (page in RUN_ALL or not leaves_out):
                outputs = [(command, printed(command, Path(folder), installed)) for command, _ in block.commands]
            if block.commands and not leaves_out:
                today = "".join(f"$ {command}\n" + (f"{output}\n" if output else "") for command, output in outputs)
                text = text.replace(f"```console\n{block.text}```", f"```console\n{today}```")
    if text != page.read_text():
        page.write_text(text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as target:
        example = install_example(Path(target))
        named = [Path(name).resolve() for name in sys.argv[1:]]
        for page in named or PAGES:
            _refresh(page, example if page in NEED_EXAMPLE else None)
