"""`forge-run doctor drill`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.cli.command_line import parse_job_arguments, positive, with_examples
from forge_core.contracts.errors import ExitCode, JobError, did_you_mean, listed
from forge_core.launch.world import join_world
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import COUNT, NUMBER, TEXT, Schema, array, keyed, maybe, of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

    from forge_plugin_resilience.drill.course import Baseline, Case, Course
    from forge_plugin_resilience.drill.results import Result
    from forge_plugin_resilience.drill.screen import Screen
    from forge_plugin_resilience.drill.subject import Subject


HEADING = "start"


def command(argv: list[str]) -> int:
    """Inject faults into a copy of a job; report which it survives.

    First the job trains some steps without a fault; then once for each fault: a rank that is killed or stands still, a
    stop request, a full disk, a damaged checkpoint, and so on. If the run ends, the same command is given again. Each
    row shows how long it took to find the fault, what the run recorded, how many steps were lost, how long the restart
    took, and whether the losses equal the losses of the run without a fault. The exit code is 1 if something did not
    hold.
    """
    options, files, overrides = parse_job_arguments(_parser(), argv)
    if not join_world().alone:
        raise JobError("forge-run doctor drill starts the ranks itself; start it once, without torchrun or srun")
    only = _names(options.only)
    from forge_plugin_resilience.drill.course import Course, cases_of
    from forge_plugin_resilience.drill.folder import DrillFolder
    from forge_plugin_resilience.drill.screen import Screen
    from forge_plugin_resilience.drill.subject import prepare

    output = Path(options.out) if options.out else None
    subject = prepare(files, overrides, options.nproc, options.steps, output)
    cases, refused = cases_of(subject, only)
    if not cases:
        raise JobError("; ".join(f"{name}: {reason}" for name, reason in refused.items()))
    signal.signal(signal.SIGTERM, _interrupt)
    with Screen(quiet=options.json) as screen:
        course = Course(subject=subject, patience_s=options.patience, show=screen.update)
        folder = DrillFolder(subject.folder)
        folder.open()
        results: list[Result] = []
        finished = False
        try:
            baseline = _baseline(course, screen, cases, refused)
            for number, case in enumerate(cases, 1):
                screen.begin(f"{number}/{len(cases)} {case.title(subject)}")
                results.append(course.run(case))
                screen.result(results[-1])
            finished = True
        finally:
            # Not of a drill that was interrupted, which leaves no files
            failed = finished and not all(result.held for result in results)
            if others := folder.close(keep=options.keep or failed):
                screen.say(f"files in {subject.folder} that the drill did not make were kept: {listed(others, 5)}")
    if options.json:
        print_json(_as_json(subject, baseline, course, results, refused))
    else:
        _conclude(Screen(quiet=False), course, results, refused, options.keep or failed)
    return ExitCode.FAILED if failed else ExitCode.FINISHED


def _interrupt(number: int, _: FrameType | None) -> None:
    # As by Ctrl-C: the processes of the run under way are killed on the way out
    sys.exit(128 + number)


def _baseline(course: Course, screen: Screen, cases: Sequence[Case], refused: Mapping[str, str]) -> Baseline:
    """Print the plan, train without a fault, and print an estimate of the remaining time."""
    subject = course.subject
    where = f"{subject.ranks} ranks" if subject.ranks > 1 else "one process"
    screen.say(f"{subject.job.job.name} on {where}, in {subject.folder}: {'; '.join(subject.changes)}")
    for name, reason in refused.items():
        screen.say(f"not drilled: {name}: {reason}")
    screen.begin("the job without a fault")
    baseline = course.baseline()
    speed = f"start {baseline.start_s:.1f} s, a step {baseline.step_s:.2g} s"
    seconds = course.estimate_s(cases)
    time = f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} s"
    screen.say(f"without a fault: {baseline.seconds:.0f} s ({speed}); {len(cases)} with one: about {time}")
    return baseline


def _conclude(
    screen: Screen, course: Course, results: Sequence[Result], refused: Mapping[str, str], kept: bool
) -> None:
    screen.table(results, refused)
    if course.spread is not None:
        words = f"two runs without a fault differ by {course.spread:.1e}" if course.spread else "it is deterministic"
        screen.say(f"the job was trained twice without a fault: {words}")
    held = sum(result.held for result in results)
    screen.say(f"{held} of {len(results)} held" + (f"; runs and logs: {course.subject.folder}" if kept else ""))


def _as_json(
    subject: Subject, baseline: Baseline, course: Course, results: Sequence[Result], refused: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "job": subject.job.job.name,
        "ranks": subject.ranks,
        "steps": subject.steps,
        "baseline": {"seconds": baseline.seconds, "start_s": baseline.start_s, "step_s": baseline.step_s},
        "spread": course.spread,
        "faults": [result.as_json() for result in results],
        "not_drilled": [{"fault": name, "reason": reason} for name, reason in refused.items()],
    }


def _names(text: str) -> list[str]:
    """Names of faults, from the option `--only`: `killed`, or `killed-1` for one rank."""
    from forge_plugin_resilience.drill.faults import FAULTS

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in FAULTS and name.rpartition("-")[0] not in FAULTS:
            hint = did_you_mean(name, FAULTS) or f"; there are {', '.join(FAULTS)}"
            raise JobError(f"--only: no fault is called {name!r}{hint}")
    return names


def step_count(text: str) -> int:
    """Type of the option `--steps`."""
    from forge_plugin_resilience.drill.subject import FEWEST_STEPS

    if (value := int(text)) < FEWEST_STEPS:
        raise argparse.ArgumentTypeError(f"must be at least {FEWEST_STEPS}: two saves, and steps around them")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("forge-run doctor drill", description=command.__doc__)
    add = parser.add_argument
    add("--nproc", type=positive, default=1, metavar="N", help="ranks on this machine (1)")
    add(
        "--steps", type=step_count, default=12, metavar="N", help="steps of each run (12); it saves every third of them"
    )
    add(
        "--only",
        default="",
        metavar="A,B",
        help="faults to inject, by name (killed, or killed-1 for rank 1 alone); default: all that apply",
    )
    folder = "folder of the drill (job.output/job.name.drill)"
    add("--out", metavar="FOLDER", help=folder)
    patience = "seconds beyond its limits after which a run counts as hanging (60)"
    add("--patience", type=positive, default=60, metavar="S", help=patience)
    add("--keep", action="store_true", help="keep the runs and their logs, as is done when something did not hold")
    add_json(parser, "; progress goes to standard error")
    with_examples(
        parser,
        "forge-run doctor drill job.toml",
        "forge-run doctor drill job.toml --nproc 2 --only killed,frozen,damaged",
        "forge-run doctor drill job.toml --nproc 8 --launch.hang_timeout_s=120 --json > drill.json",
    )
    return parser


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    from forge_plugin_resilience.drill.results import Result

    drill = keyed(
        job=TEXT,
        ranks=COUNT,
        steps=COUNT,
        baseline=keyed(seconds=NUMBER, start_s=maybe(NUMBER), step_s=maybe(NUMBER)),
        spread=maybe(NUMBER),
        faults=array(of(Result)),
        not_drilled=array(keyed(fault=TEXT, reason=TEXT)),
    )
    return {"": drill}
