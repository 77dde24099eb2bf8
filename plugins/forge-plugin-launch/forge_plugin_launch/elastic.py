"""`forge-run launch elastic`: train, and start the ranks again when one fails."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.contracts.errors import ExitCode, ForgeError, JobError
from forge_core.contracts.run_end import Cause, End
from forge_kit.tools.commands import count

if TYPE_CHECKING:
    from forge_core import Job


HEADING = "train"


def command(argv: list[str]) -> int:
    """Start ranks on this machine, and restart them when one fails.

    A rank that is killed, raises, is frozen or hangs ends the others; then all are started again, and the run continues
    from its newest checkpoint. The same error at the same step twice is the job's or the data's, and ends the run, as
    do wrong jobs, losses that are not finite and requests to stop.
    """
    parser = argparse.ArgumentParser("forge-run launch elastic", description=command.__doc__)
    parser.add_argument("--nproc", type=positive, required=True, metavar="N", help="ranks to start")
    parser.add_argument("--max-restarts", type=count, default=3, metavar="K", help="restarts at the most (3)")
    fewer = "when ranks cannot be started: continue with fewer, as the job allows, but at least this many (N)"
    parser.add_argument("--min-nproc", type=positive, metavar="M", help=fewer)
    hot = "keep a spare process for each rank that has imported torch: restarts are faster, for its memory"
    parser.add_argument("--hot", action="store_true", help=hot)
    parser.add_argument(
        "--resume", default="auto", metavar="auto|never|PATH", help="as of forge-run, at the first start"
    )
    parser.add_argument("--resume-with-changes", action="store_true", help="as of forge-run")
    parser.add_argument("-q", "--quiet", action="store_true", help="as of forge-run")
    with_examples(
        parser,
        "forge-run launch elastic job.toml --nproc 4",
        "forge-run launch elastic job.toml --nproc 8 --min-nproc 4",
    )
    options, files, overrides = parse_job_arguments(parser, argv)
    least = options.min_nproc or options.nproc
    if least > options.nproc:
        raise JobError(f"--min-nproc {least} is more than --nproc {options.nproc}; it must be at most as many")
    from forge_core.config.load import load_job

    # Checked here once, before each of the ranks would report the same mistakes
    job = load_job(*files, overrides=overrides, world_size=options.nproc)
    arguments = [*files, *overrides, *["--quiet"] * options.quiet]
    arguments += ["--resume-with-changes"] * options.resume_with_changes
    with _spares(options.hot, options.nproc) as spares:
        run = ElasticRun(job, arguments, options.resume, spares)
        return run_elastic(run, options.nproc, least, options.max_restarts, lambda ranks: fits(files, overrides, ranks))


@contextmanager
def _spares(hot: bool, ranks: int) -> Iterator[Callable | None]:
    if not hot:
        yield None
        return
    from forge_plugin_launch.spares import Spares

    spares = Spares(ranks)
    try:
        yield spares
    finally:
        spares.close()


def fits(files: list[str], overrides: list[str], ranks: int) -> bool:
    """Whether the job is right for this number of ranks."""
    from forge_core.config.load import load_job

    try:
        load_job(*files, overrides=overrides, world_size=ranks)
    except ForgeError:
        return False
    return True


@frozen(kw_only=True)
class StartResult:
    """How one start of all ranks ended."""

    code: int
    message: str = ""
    """For a person."""
    end: End | None = None
    """What the launcher knows of it; None: nothing."""
    began: int = 0
    """Steps that the run had when they started."""
    step: int = 0
    """Steps that it had when they ended."""

    @property
    def is_lost(self) -> bool:
        """Whether a rank died without a report, so that the cause may be the machine's memory."""
        return self.end is not None and self.end.cause is Cause.KILLED

    @property
    def signature(self) -> tuple[int, str]:
        """Equal for the same error at the same step; ranks, addresses and seconds in its text do not count."""
        text = self.message if self.end is None else f"{self.end.cause}: {self.end.reason}"
        return self.step, re.sub(r"0x[0-9a-f]+|\d+", "", text)


@define
class ElasticRun:
    """Starts the ranks of a job, again and again."""

    job: Job
    arguments: list[str]
    resume: str
    popen: Callable | None = None
    starts: int = field(default=0, init=False)

    def start(self, ranks: int) -> StartResult:
        """Start the ranks, and wait until they have ended."""
        from forge_kit.tools.supervisor import Supervisor

        folder, began = Path(self.job.job.output) / self.job.job.name, self.step()
        # `never` is for the first start: a restart continues from what that one has saved
        resume = "auto" if self.starts and self.resume == "never" else self.resume
        self.starts += 1
        command = [sys.executable, "-m", "forge_core", "run", *self.arguments, f"--resume={resume}", "--nproc=1"]
        popen = self.popen or subprocess.Popen
        limits = self.job.launch.grace_s, self.job.launch.silence_timeout_s
        ended = Supervisor(command, ranks, folder / "logs", *limits, popen=popen).run()
        return StartResult(code=ended.code, message=ended.message, end=ended.end, began=began, step=self.step())

    def step(self) -> int:
        """The last step that the run's metrics have; 0 if there are none."""
        from forge_kit.tools.metrics import read_metrics

        try:
            metrics = read_metrics(Path(self.job.job.output) / self.job.job.name)
        except ForgeError:
            return 0
        return metrics[-1]["step"] if metrics else 0


def run_elastic(run: ElasticRun, ranks: int, least: int, restarts: int, fits: Callable[[int], bool]) -> int:
    """Start a run until it ends well, may not be started again, or would fail in the same way; the exit code."""
    from forge_core.launch.rank_process import this_process

    before: tuple[StartResult, int] | None = None
    with this_process.stoppable():
        for number in range(restarts + 1):
            attempt = run.start(ranks)
            # Other codes are final, such as a request to stop, a wrong job or losses that are not finite
            if attempt.code != ExitCode.FAILED:
                _say(attempt.message)
                return attempt.code
            now = ranks
            if before is not None and attempt.step <= attempt.began:
                # Ranks that cannot even begin: a GPU has gone, or memory does not suffice for as many
                ranks = next((fewer for fewer in range(ranks - 1, least - 1, -1) if fits(fewer)), ranks)
            is_same = before is not None and before[0].signature == attempt.signature
            if is_same and (ranks == now or not attempt.is_lost):
                _say(attempt.message)
                _say(f"forge-run: the same error twice, after step {attempt.step:,}: it is the job's or the data's")
                return attempt.code
            _say(attempt.message)
            if number < restarts:
                on = f"{ranks} rank{'s' if ranks > 1 else ''}"
                _say(f"forge-run: restart {number + 1} of {restarts}, on {on}, after step {attempt.step:,}")
            before = (attempt, now)
    return attempt.code


def _say(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)
