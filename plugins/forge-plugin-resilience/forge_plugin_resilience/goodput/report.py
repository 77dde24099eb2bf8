"""The report of `forge-run profile goodput` on a run: as plain types, and in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from statistics import mean, median
from typing import Any

from forge_core.job import METRICS
from forge_kit.tools.tables import columns
from forge_plugin_resilience.goodput.accounting import CLASSES, Account, Attempt
from forge_plugin_resilience.goodput.events import EVENTS
from forge_plugin_resilience.goodput.failure_rate import best_interval, effective_time, expected_mtbf, mtbf_interval
from forge_plugin_resilience.goodput.run_account import RunAccount, StepLines
from forge_plugin_resilience.goodput.words import count, duration, share, size

WIDTH = 72
"""Columns of a reason in the table; JSON has all of it."""
SHOWN = 20
"""Starts that the table has: the last ones."""
LOST = "made_again"


def facts_of(run: RunAccount) -> dict[str, Any]:
    """Returns the account as plain types. Numbers that are not finite are strings."""
    facts: dict[str, Any] = {"run": str(run.folder), "running": run.running, "steps": run.steps}
    if run.account is None:
        assert run.lines is not None
        return facts | {"source": METRICS, **_line_facts(run.lines), "starts_in_slurm": len(run.attempts)}
    account = run.account
    return facts | {
        "source": EVENTS,
        "began": account.began,
        "ended": account.ended,
        "lifetime_s": account.lifetime,
        "goodput": account.goodput,
        "ettr": account.ettr,
        "classes": account.classes,
        "step": max((attempt.step for attempt in account.attempts), default=0),
        "step_s": account.step_s,
        "lost_steps": sum(attempt.lost_steps for attempt in account.attempts),
        "data_wait_slowest_s": run.lines.data if run.lines else None,
        "attempts": [_attempt_facts(attempt) for attempt in account.attempts],
        "saves": _save_facts(account),
        "roll_backs": [{key: each.get(key) for key in ("t", "from", "to", "why")} for each in account.roll_backs],
        "faults": account.faults,
        "failures": _failure_facts(account, run.gpu_years),
        "interval": _interval_facts(account, run),
    }


def _line_facts(lines: StepLines) -> dict[str, Any]:
    lifetime = lines.ended - lines.began
    return {
        "began": lines.began,
        "ended": lines.ended,
        "lifetime_s": lifetime,
        "goodput": lines.productive / lifetime if lifetime else 0.0,
        "classes": {"productive": lines.productive, "data": lines.data, "not_told_apart": lines.rest},
        "step_s": lifetime and (lines.productive + lines.data) / lines.steps,
    }


def _attempt_facts(attempt: Attempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "job": attempt.facts.get("job"),
        "restart": attempt.facts.get("restart"),
        "hosts": attempt.facts.get("hosts") or attempt.slurm.get("nodes"),
        "ranks": attempt.facts.get("ranks"),
        "began": attempt.began,
        "ready": attempt.ready,
        "ended": attempt.ended,
        "from_step": attempt.facts.get("from_step"),
        "step": attempt.step,
        "steps": attempt.steps,
        "skipped": attempt.skipped,
        "lost_steps": attempt.lost_steps,
        "lost_s": attempt.lost_s,
        "evaluations": attempt.evaluations,
        "saves": len(attempt.saves),
        "code": attempt.end.code if attempt.end else attempt.slurm.get("code"),
        "cause": attempt.end and attempt.end.cause,
        "why": attempt.why,
        "failed": attempt.failed,
        "classes": attempt.totals(),
    }


def _save_facts(account: Account) -> dict[str, Any]:
    written = [save.write_s for save in account.saves if save.write_s is not None]
    sizes = [save.size for save in account.saves if save.size]
    return {
        "count": len(account.saves),
        "not_committed": sum(not save.committed for save in account.saves),
        "blocked_s": account.blocked_s,
        "write_s": median(written) if written else None,
        "bytes": sizes[-1] if sizes else None,
    }


def _failure_facts(account: Account, gpu_years: float) -> dict[str, Any]:
    low, high = mtbf_interval(account.exposure, account.failures) if account.exposure else (0.0, math.inf)
    return {
        "count": account.failures,
        "exposure_s": account.exposure,
        "mtbf_s": account.exposure / account.failures if account.failures else None,
        "mtbf_90_s": [low, high if math.isfinite(high) else "inf"],  # JSON has no infinity
        "expected_mtbf_s": expected_mtbf(account.exposure, account.failures, account.ranks, gpu_years),
        "restart_s": account.restart_s,
    }


def _interval_facts(account: Account, run: RunAccount) -> dict[str, Any] | None:
    """The interval that would have been best, and what the chosen one costs; None before the first save."""
    blocked, chosen = account.blocked_s, account.between_saves_s
    if not blocked or not chosen:
        return None
    mtbf = expected_mtbf(account.exposure, account.failures, account.ranks, run.gpu_years)
    restart = account.restart_s
    best = best_interval(blocked, mtbf, restart, run.longest_s)
    most, real = (effective_time(interval, blocked, restart, mtbf) for interval in (best, chosen))
    step = account.step_s
    return {
        "best_s": best,
        "chosen_s": chosen,
        "best_steps": max(1, round(best / step)) if step else None,
        "chosen_steps": max(1, round(chosen / step)) if step else None,
        "cost": max(0.0, 1 - real / most),
    }


# --- in words ----------------------------------------------------------------------------------------------------


def describe(facts: Mapping[str, Any]) -> str:
    """Returns the facts as paragraphs and tables."""
    if facts["source"] == METRICS:
        return "\n".join(_of_lines(facts))
    blocks = [headline(facts), columns([*_class_rows(facts)]), columns([*attempt_rows(facts)])]
    return "\n\n".join([*blocks, "\n".join(sentences(facts))])


def _of_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    classes, lifetime = facts["classes"], facts["lifetime_s"]
    yield f"{facts['run']}: {duration(lifetime)}, {share(classes['productive'], lifetime)} in steps that count"
    yield f"  {share(classes['data'], lifetime)} waiting for data (slowest rank)"
    rest = "saves, evaluations, work made again, restarts, time in which nothing ran"
    yield f"  {share(classes['not_told_apart'], lifetime)} not distinguished: {rest}"
    yield "by metrics.jsonl, which has no step that was lost; [hooks.goodput] notes the rest from the next start on"
    if facts["starts_in_slurm"]:
        yield f"attempts.jsonl has {count(facts['starts_in_slurm'], 'SLURM job')}"


def headline(facts: Mapping[str, Any]) -> str:
    """Returns a sentence: how long, how much of it productive, at which step."""
    of = f" of {facts['steps']:,}" if facts["steps"] else ""
    words = f"{facts['run']}: {duration(facts['lifetime_s'])}, {100 * facts['goodput']:.1f} % productive"
    if facts["classes"]["queue"]:
        words += f" (ETTR with queues {100 * facts['ettr']:.1f} %)"
    state = "running, " if facts["running"] else ""
    return f"{words}; {state}step {facts['step']:,}{of}, {count(len(facts['attempts']), 'start')}"


def _class_rows(facts: Mapping[str, Any]) -> Iterator[list[str]]:
    yield ["time", "share", "class"]
    for name, seconds in facts["classes"].items():
        # Smaller shares would be printed as 0.0 %
        if seconds >= 0.0005 * facts["lifetime_s"] or name in ("productive", LOST):
            words = CLASSES[name]
            if name == LOST and facts["lost_steps"]:
                words += f" ({count(facts['lost_steps'], 'step')})"
            yield [duration(seconds), share(seconds, facts["lifetime_s"]), f"{name.replace('_', ' ')}: {words}"]


def attempt_rows(facts: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields the titles, and a row for each of the last starts."""
    yield ["start", "began", "ran", "steps", "lost", "saves", "ready after", "end"]
    for each in facts["attempts"][-SHOWN:]:
        steps = f"{each['from_step']:,} to {each['step']:,}" if each["from_step"] is not None else "none"
        ready = duration(each["ready"] - each["began"]) if each["ready"] is not None else "never"
        yield [
            str(each["number"]),
            datetime.fromtimestamp(each["began"]).strftime("%Y-%m-%d %H:%M:%S"),
            duration(each["ended"] - each["began"]),
            steps,
            f"{each['lost_steps']:,}",
            str(each["saves"]),
            ready,
            _cut(each["why"]) + (f" (exit code {each['code']})" if each["code"] else ""),
        ]


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[:WIDTH]}…"


def sentences(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields what saves and failures have cost."""
    saves, failures, interval = facts["saves"], facts["failures"], facts["interval"]
    if saves["count"]:
        words = f"saves: {saves['count']:,}, each keeps training waiting for {duration(saves['blocked_s'])} (median)"
        words += f", and is written after {duration(saves['write_s'])}" if saves["write_s"] is not None else ""
        words += f"; {size(saves['bytes'])}" if saves["bytes"] else ""
        words += f"; {saves['not_committed']} never became a checkpoint" if saves["not_committed"] else ""
        yield words
    if slowest := facts["data_wait_slowest_s"]:
        yield f"data: the slowest rank waited for {duration(slowest)}, by the steps in metrics.jsonl"
    again = [each["classes"].get(LOST, 0.0) for each in facts["attempts"] if each["failed"]]
    low, high = (math.inf if bound == "inf" else bound for bound in failures["mtbf_90_s"])
    upper = f"{duration(low)} to {duration(high)}" if math.isfinite(high) else f"at least {duration(low)}"
    if failures["count"]:
        cost = f"{duration(mean(again))} of work lost, restarts of {duration(failures['restart_s'])} (median)"
        yield f"failures: {failures['count']}, in the mean {cost}"
        yield f"time between failures: {duration(failures['mtbf_s'])} (90 %: {upper})"
    else:
        # Without a failure there is no upper bound, and one side of a 90 % interval holds with 95 %
        yield f"failures: none in {duration(failures['exposure_s'])}; the time between them is {upper} (95 %)"
    for each in facts["roll_backs"]:
        yield f"rolled back from step {each['from']:,} to {each['to']:,}: {each['why']}"
    if facts["faults"]:
        yield f"faults: {len(facts['faults'])} noted"
    if interval:
        yield _interval_words(interval, failures)


def _interval_words(interval: Mapping[str, Any], failures: Mapping[str, Any]) -> str:
    def words(name: str) -> str:
        steps = interval[f"{name}_steps"]
        return (f"{count(steps, 'step')}, " if steps else "") + duration(interval[f"{name}_s"])

    best = f"best interval of saves: {words('best')}"
    expected = f"if failures come every {duration(failures['expected_mtbf_s'])}"
    return f"{best}, {expected}; the chosen one ({words('chosen')}) costs {100 * interval['cost']:.2g} % of the time"
