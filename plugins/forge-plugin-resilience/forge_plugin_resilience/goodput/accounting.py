"""The account of a run's time: each second of it, over all starts, belongs to exactly one class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

from attrs import define, field

from forge_core.contracts.errors import ExitCode
from forge_core.contracts.phase import COMPUTING, Phase
from forge_core.contracts.run_end import Cause, End

CLASSES: Mapping[str, str] = {
    "productive": "steps that count: forward, backward, optimizer, agreement of the ranks",
    "made_again": "steps that were made again after a restart, or will have to be",
    "undone": "steps whose effect a roll-back took away, and going back",
    "data": "waiting for data (rank 0)",
    "hooks": "hooks",
    "evaluation": "evaluations",
    "save": "saves, as long as they keep training waiting",
    "first_step": "what the first step of a start takes longer than the others: compilation, warm-up",
    "initialisation": "process, imports, process groups",
    "preparation": "reading data, building the model",
    "restore": "looking for a checkpoint and loading it",
    "queue": "waiting in SLURM's queue",
    "silent": "from the last line of a start that died to the end of its job",
    "down": "between an end and the next start",
    "open": "since the last line, of a run that is running",
    "other": "anything else",
}
PHASES: Mapping[Phase, str] = {
    **dict.fromkeys(COMPUTING, "productive"),
    Phase.DATA: "data",
    Phase.HOOK: "hooks",
    Phase.EVALUATION: "evaluation",
    Phase.SAVE: "save",
    Phase.GOING_BACK: "undone",
}
START_PHASES: Mapping[str, str] = {
    **dict.fromkeys((Phase.IMPORTS, Phase.START, Phase.GROUPS), "initialisation"),
    **dict.fromkeys((Phase.SEARCH, Phase.LOADING), "restore"),
}
OF_STEPS = ("productive", "data", "hooks")
"""Classes whose seconds are lost with the steps to which they belong."""
PLANNED = ("finished", "preempted", "time", "cancelled", "stopped")
"""Ends of SLURM jobs that are no failures, as forge-plugin-launch names them."""


@define(kw_only=True)
class Stretch:
    """A line of the file as a stretch of time."""

    event: str
    begin: float
    end: float
    classes: dict[str, float]
    """Seconds by class."""
    first: int = 0
    last: int = 0
    """First and last step; 0 where there are none."""
    count: int = 0
    """Steps that were trained on."""

    @property
    def kind(self) -> str:
        """The class that takes most of it."""
        return max(self.classes, key=lambda name: self.classes[name], default="other")

    def lose(self, to: str) -> None:
        """Move the seconds of its steps to another class."""
        self.classes[to] = self.classes.get(to, 0.0) + sum(self.classes.pop(name, 0.0) for name in OF_STEPS)

    def split(self, step: int) -> Stretch:
        """Keep the steps up to `step`, and return a stretch of the others."""
        # Seconds of single steps are not in the file, so the steps of a line count as equally long
        share = (step - self.first + 1) / (self.last - self.first + 1)
        middle = self.begin + share * (self.end - self.begin)
        kept = {name: share * seconds for name, seconds in self.classes.items()}
        rest = {name: seconds - kept[name] for name, seconds in self.classes.items()}
        count = round(share * self.count)
        other = Stretch(
            event=self.event,
            begin=middle,
            end=self.end,
            classes=rest,
            first=step + 1,
            last=self.last,
            count=self.count - count,
        )
        self.end, self.classes, self.last, self.count = middle, kept, step, count
        return other


@define(kw_only=True)
class Save:
    """A save of a checkpoint."""

    step: int
    t: float
    blocked_s: float
    write_s: float | None = None
    """Seconds until it was there, of one that was written in the background."""
    size: int | None = None
    """Bytes."""
    committed: bool = True


@define(kw_only=True)
class Attempt:
    """One start of the run."""

    number: int
    facts: Mapping[str, Any]
    """Its line `start`."""
    began: float
    ended: float
    """Time of its last line."""
    ready: float | None = None
    step: int = 0
    """Last step that it made."""
    end: End | None = None
    """By its line `end`, or by `end.json` if it is the last; None if it died without one, or is running."""
    slurm: Mapping[str, Any] = field(factory=dict)
    """Its line in attempts.jsonl of forge-plugin-launch; empty if it has none."""
    stretches: list[Stretch] = field(factory=list)
    saves: list[Save] = field(factory=list)
    evaluations: int = 0
    steps: int = 0
    skipped: int = 0
    lost_steps: int = 0
    """Steps that later ones made again."""
    lost_s: float = 0.0
    running: bool = False

    @property
    def failed(self) -> bool:
        """Whether it ended, and neither at its last step nor by request."""
        if self.running:
            return False
        # The batch script has seen more: after a node failure the run itself has recorded nothing
        if self.slurm.get("kind"):
            return self.slurm["kind"] not in PLANNED
        return self.end is None or self.end.code not in (ExitCode.FINISHED, ExitCode.STOPPED)

    def totals(self) -> dict[str, float]:
        """Returns the seconds of this start, and of the gap before it, by class."""
        totals: defaultdict[str, float] = defaultdict(float)
        for stretch in self.stretches:
            for name, seconds in stretch.classes.items():
                totals[name] += seconds
        return dict(totals)

    @property
    def why(self) -> str:
        """How it ended, in words."""
        if self.running:
            return "running"
        words = self.slurm.get("reason") or (self.end and (self.end.reason or self.end.cause))
        return words or "died without a word"


@define(kw_only=True)
class _RollBack:
    at: int
    stretches: list[Stretch]


@define(kw_only=True)
class Account:
    """Where the time of a run went."""

    attempts: list[Attempt]
    classes: dict[str, float]
    """Seconds by class, all of `CLASSES`; they add up to `lifetime`."""
    began: float
    """Begin of the first start, or of its time in the queue."""
    ended: float
    faults: list[Mapping[str, Any]] = field(factory=list)
    roll_backs: list[Mapping[str, Any]] = field(factory=list)

    @property
    def lifetime(self) -> float:
        """Seconds from `began` to `ended`, with the time in queues and between starts."""
        return self.ended - self.began

    @property
    def goodput(self) -> float:
        """Productive share of the time, without that in queues."""
        time = self.lifetime - self.classes["queue"]
        return self.classes["productive"] / time if time else 0.0

    @property
    def ettr(self) -> float:
        """Productive share of all time, queues included (effective training time ratio)."""
        return self.classes["productive"] / self.lifetime if self.lifetime else 0.0

    @property
    def exposure(self) -> float:
        """Seconds in which it could fail: the duration of all starts."""
        return sum(attempt.ended - attempt.began for attempt in self.attempts)

    @property
    def failures(self) -> int:
        """Starts that ended neither at the last step nor by request; a running one is none."""
        return sum(attempt.failed for attempt in self.attempts)

    @property
    def ranks(self) -> int:
        """Ranks of the last start that has recorded them; 1 if none has."""
        return next((each.facts["ranks"] for each in reversed(self.attempts) if "ranks" in each.facts), 1)

    def restarts(self, failed: bool = True) -> list[float]:
        """Returns the seconds from the last line of each start to where the next one trained."""
        pairs = zip(self.attempts, self.attempts[1:], strict=False)
        return [
            later.ready - earlier.ended
            for earlier, later in pairs
            if later.ready is not None and (earlier.failed or not failed)
        ]

    @property
    def restart_s(self) -> float:
        """Median restart after a failure; else after any end; else what the first start took."""
        starts = [attempt.ready - attempt.began for attempt in self.attempts if attempt.ready is not None]
        return median(self.restarts() or self.restarts(failed=False) or starts or [0.0])

    @property
    def saves(self) -> list[Save]:
        """The saves of all starts, in order; those that never became a checkpoint too."""
        return [save for attempt in self.attempts for save in attempt.saves]

    @property
    def blocked_s(self) -> float | None:
        """Median seconds that a save kept training waiting; None before the first."""
        return median([save.blocked_s for save in self.saves]) if self.saves else None

    @property
    def between_saves_s(self) -> float | None:
        """Median seconds of training between two saves, or from a start to its first; None before the first."""
        gaps = []
        for attempt in self.attempts:
            # `t` is when a save let training continue: what it blocked is not training
            times = [attempt.ready or attempt.began, *(save.t for save in attempt.saves)]
            pairs = zip(times, times[1:], attempt.saves, strict=False)
            gaps += [later - save.blocked_s - earlier for earlier, later, save in pairs]
        return max(0.0, median(gaps)) if gaps else None

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, in the mean over those that count; None before the first."""
        counted = [each for attempt in self.attempts for each in attempt.stretches if each.classes.get("productive")]
        steps = sum(each.count for each in counted)
        time = sum(each.classes.get(name, 0.0) for each in counted for name in OF_STEPS)
        return time / steps if steps else None


def account_of(
    events: Iterable[Mapping[str, Any]],
    *,
    slurm: Sequence[Mapping[str, Any]] = (),
    from_step: int | None = None,
    now: float | None = None,
    end: End | None = None,
) -> Account:
    """Account for the time of a run.

    Args:
        events: lines of `events.jsonl`, in order.
        slurm: lines of `attempts.jsonl`, by forge-plugin-launch.
        from_step: step from which another start continues, that is not in the events yet.
        now: present time, of a run that is running.
        end: `end.json`, of the last start; for a start that was killed, the only record of the reason.
    """
    accountant = _Accountant(slurm)
    for event in _with_silent_starts(list(events), slurm):
        accountant.take(event)
    return accountant.result(from_step, now, end)


def _with_silent_starts(events: list[Mapping[str, Any]], slurm: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Add lines for SLURM jobs that ended before training began."""
    known = {_slurm_key(event) for event in events if event.get("event") == "start"}
    # With the name of the job as the line `start` of a run has it
    silent = [each for each in slurm if _slurm_key({**each, "job": f"SLURM {each.get('job')}"}) not in known]
    for each in silent:
        if not each.get("began") or not each.get("ended"):
            continue
        place = next(
            (n for n, event in enumerate(events) if event.get("event") == "start" and event["t"] > each["began"]),
            len(events),
        )
        start = f"slurm-{each.get('job')}-{each.get('restart')}"
        facts = {"job": f"SLURM {each.get('job')}", "restart": each.get("restart", 0), "began": each["began"]}
        # All of it counts as initialisation, since no step was made
        spent = {Phase.IMPORTS: each["ended"] - each["began"]}
        code = ExitCode.FAILED if each.get("code") is None else each["code"]
        facts_of_end = {"code": code, "cause": Cause.of(code), "reason": each.get("reason", "")}
        end = {"event": "end", "start": start, "t": each["ended"], **facts_of_end}
        events[place:place] = [
            {"event": "start", "start": start, "t": each["began"], **facts},
            {"event": "ready", "start": start, "t": each["ended"], "s": spent, "never": True},
            end,
        ]
    return events


def _slurm_key(facts: Mapping[str, Any]) -> tuple[Any, Any]:
    return facts.get("job"), facts.get("restart", 0)


class _Accountant:
    """Goes through the events in order; `_live` are the stretches of steps that count so far, by rising steps."""

    def __init__(self, slurm: Sequence[Mapping[str, Any]]) -> None:
        self._slurm = {(f"SLURM {each.get('job')}", each.get("restart", 0)): each for each in slurm}
        self._attempts: list[Attempt] = []
        self._live: list[tuple[Attempt, Stretch]] = []
        self._gone_back: list[tuple[int, list[tuple[Attempt, Stretch]]]] = []
        self._faults: list[Mapping[str, Any]] = []
        self._roll_backs: list[Mapping[str, Any]] = []
        self._saved = 0

    def take(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        if not isinstance(event.get("t"), int | float):
            return
        if kind == "start":
            self._begin(event)
        elif kind == "fault":
            self._faults.append(event)
        # Lines that an earlier process still wrote after the next start would count the same time twice
        elif self._attempts and event.get("start") == self._attempts[-1].facts["start"]:
            self._continue(event)

    def _begin(self, event: Mapping[str, Any]) -> None:
        slurm = self._slurm.get(_slurm_key(event), {})
        began, number = float(event.get("began", event["t"])), len(self._attempts) + 1
        last = self._attempts[-1] if self._attempts else None
        if last is not None:
            began = max(began, last.ended)  # of a second run in one process, or a machine whose clock is behind
        attempt = Attempt(number=number, facts=event, began=began, ended=began, slurm=slurm)
        attempt.step = int(event.get("from_step") or 0)
        attempt.stretches += _gap(last, attempt)
        if event.get("from_step") is not None:  # no step: it ended before it loaded a checkpoint
            self._go_on_from(attempt.step)
        self._attempts.append(attempt)

    def _continue(self, event: Mapping[str, Any]) -> None:
        attempt, kind = self._attempts[-1], str(event["event"])
        stretch = Stretch(event=kind, begin=attempt.ended, end=max(attempt.ended, event["t"]), classes={})
        stretch.classes = _classes(event, attempt, stretch.end - stretch.begin)
        attempt.stretches.append(stretch)
        attempt.ended = stretch.end
        if kind == "ready" and not event.get("never"):
            attempt.ready = stretch.end
        elif kind == "steps":
            self._steps(event, attempt, stretch)
        elif kind == "evaluation":
            attempt.evaluations += 1
        elif kind == "save":
            self._save(event, attempt)
        elif kind == "written":
            self._written(event, attempt)
        elif kind == "undone":
            self._roll_back(event)
        elif kind == "end":
            with suppress(TypeError, ValueError):  # of another version
                attempt.end = End.from_dict(event)

    def _steps(self, event: Mapping[str, Any], attempt: Attempt, stretch: Stretch) -> None:
        stretch.first, stretch.last, stretch.count = event["first"], event["step"], event["n"]
        attempt.step = stretch.last
        attempt.steps += stretch.count
        attempt.skipped += event.get("skipped", 0)
        if self._gone_back and stretch.first <= self._gone_back[-1][0]:
            self._gone_back.pop()  # progress went back too: what was undone cannot come back with a checkpoint
        self._live.append((attempt, stretch))

    def _save(self, event: Mapping[str, Any], attempt: Attempt) -> None:
        blocked = sum((event.get("s") or {}).values())
        # One in the background is committed by a later line `written`, or never
        committed = not event.get("failed") and not event.get("in_background")
        save = Save(step=event["step"], t=event["t"], blocked_s=blocked, size=event.get("bytes"), committed=committed)
        attempt.saves.append(save)
        self._saved = save.step if committed else self._saved

    def _written(self, event: Mapping[str, Any], attempt: Attempt) -> None:
        # The newest one of that step, which may have been saved before the run went back
        save = next((each for each in reversed(attempt.saves) if each.step == event["step"]), None)
        if save is not None:
            save.committed, save.write_s, save.size = True, event.get("write_s"), event.get("bytes")
        self._saved = event["step"]

    def _roll_back(self, event: Mapping[str, Any]) -> None:
        self._roll_backs.append(event)
        lost = self._beyond(event["to"])
        for _, stretch in lost:
            stretch.lose("undone")
        # Kept, since a later start may continue from a checkpoint before this roll-back
        self._gone_back.append((event["from"], lost))

    def _go_on_from(self, step: int) -> None:
        """Continue the run from a checkpoint of `step`: everything done after it is lost, including roll-backs."""
        lost = self._beyond(step)
        while self._gone_back and self._gone_back[-1][0] > step:
            _, undone = self._gone_back.pop()
            for attempt, stretch in undone:
                if stretch.first <= step < stretch.last:
                    _divide(attempt, stretch, step)
                if stretch.last <= step:
                    stretch.classes["productive"] = stretch.classes.pop("undone", 0.0)  # the roll-back is lost itself
                    self._live.append((attempt, stretch))
        for attempt, stretch in lost:
            attempt.lost_steps += stretch.count
            attempt.lost_s += sum(stretch.classes.get(name, 0.0) for name in OF_STEPS)
            # After the sum above: it empties the classes that are added up there
            stretch.lose("made_again")

    def _beyond(self, step: int) -> list[tuple[Attempt, Stretch]]:
        """Take the stretches after `step` from those that count; one that it divides is split."""
        beyond = []
        while self._live and self._live[-1][1].last > step:
            attempt, stretch = self._live.pop()
            if stretch.first <= step:
                self._live.append((attempt, stretch))
                stretch = _divide(attempt, stretch, step)
            beyond.append((attempt, stretch))
        return beyond[::-1]  # by rising steps again

    def result(self, from_step: int | None, now: float | None, end: End | None) -> Account:
        last = self._attempts[-1] if self._attempts else None
        if from_step is not None:
            self._go_on_from(from_step)
        elif last is not None and now is None and last.end is None:
            self._go_on_from(self._saved)  # it died: its steps since the last save are lost by now
        for attempt in self._attempts:
            # After the above: lost steps are no longer productive, and do not enter the mean
            _set_first_step_apart(attempt)
        if last is not None and now is not None:
            last.running = True
            _extend(last, "open", now)
        elif last is not None and last.end is None:
            last.end = end if end is not None and end.ended > last.began else None
            _extend(last, "silent", max(last.slurm.get("ended", 0.0), last.end.ended if last.end else 0.0))
        totals = dict.fromkeys(CLASSES, 0.0)
        for attempt in self._attempts:
            for name, seconds in attempt.totals().items():
                totals[name] += seconds
        begin = self._attempts[0].stretches[0].begin if last is not None and self._attempts[0].stretches else 0.0
        return Account(
            attempts=self._attempts,
            classes=totals,
            began=begin,
            ended=last.ended if last is not None else 0.0,
            faults=self._faults,
            roll_backs=self._roll_backs,
        )


def _classes(event: Mapping[str, Any], attempt: Attempt, length: float) -> dict[str, float]:
    """Returns the seconds of a line by class; together they are the time since the line before it."""
    classes: defaultdict[str, float] = defaultdict(float)
    for phase, seconds in (event.get("s") or {}).items():
        classes[_class_of(phase, starting=event["event"] == "ready")] += seconds
    if event["event"] == "ready" and attempt.began > attempt.facts.get("began", attempt.began):
        # `_begin` has moved the begin of the start: what lies before it belongs to the start before
        classes["initialisation"] -= attempt.began - attempt.facts["began"]
    classes["other"] += length - sum(classes.values())  # of rounding, unless lines are missing
    return {name: seconds for name, seconds in classes.items() if seconds}


def _class_of(name: str, starting: bool) -> str:
    if starting:
        return START_PHASES.get(name, "preparation")
    try:
        return PHASES.get(Phase.of(name), "other")
    except ValueError:  # of another version
        return "other"


def _gap(last: Attempt | None, attempt: Attempt) -> list[Stretch]:
    """Returns the stretches between the last line of a start and the begin of the next one."""
    end = attempt.began
    began = attempt.slurm.get("began") or end
    queued = attempt.facts.get("queued_s")
    begin = last.ended if last is not None else min(began, end) - (queued or 0.0)
    # From the begin of the SLURM job to the begin of the process
    launch = max(0.0, end - max(began, begin))
    left = end - launch - begin
    dead = 0.0
    if last is not None and last.end is None:
        dead = min(left, max(0.0, last.slurm.get("ended", 0.0) - last.ended))
    if queued is None:
        # Without SLURM's figure, all time between two recorded jobs is the queue's, and other time is none of it
        queued = left - dead if last is None or (last.slurm.get("ended") and attempt.slurm) else 0.0
    queue = min(left - dead, queued)
    parts = {"silent": dead, "down": left - dead - queue, "queue": queue, "initialisation": launch}
    stretches = []
    for name, seconds in parts.items():
        if seconds > 0:
            stretches.append(Stretch(event="gap", begin=begin, end=begin + seconds, classes={name: seconds}))
            begin += seconds
    return stretches


def _divide(attempt: Attempt, stretch: Stretch, step: int) -> Stretch:
    """Split a stretch of a start after `step`; returns the second part."""
    place = next(number for number, each in enumerate(attempt.stretches) if each is stretch)
    rest = stretch.split(step)
    attempt.stretches.insert(place + 1, rest)
    return rest


def _extend(attempt: Attempt, name: str, end: float) -> None:
    """Add a stretch of one class from the last line of a start to `end`, if that is later."""
    if end > attempt.ended:
        seconds = {name: end - attempt.ended}
        attempt.stretches.append(Stretch(event=name, begin=attempt.ended, end=end, classes=seconds))
        attempt.ended = end


def _set_first_step_apart(attempt: Attempt) -> None:
    """Move the additional time of the first step, compared with the others, to a separate class."""
    steps = [stretch for stretch in attempt.stretches if stretch.event == "steps" and stretch.count]
    # The hook writes a separate line for the first step of a start
    if len(steps) < 2 or steps[0].count != 1 or "productive" not in steps[0].classes:
        return
    others = [stretch for stretch in steps[1:] if "productive" in stretch.classes]
    count = sum(stretch.count for stretch in others)
    if count:
        mean = sum(stretch.classes["productive"] for stretch in others) / count
        longer = max(0.0, steps[0].classes["productive"] - mean)
        steps[0].classes["productive"] -= longer
        steps[0].classes["first_step"] = longer
