"""Schema of what `forge-run profile goodput --json` prints of a run: see `report.facts_of`."""

from __future__ import annotations

from forge_kit.tools.output_schema import (
    ANYTHING,
    COUNT,
    FLAG,
    NUMBER,
    SECONDS,
    TEXT,
    array,
    by_name,
    keyed,
    maybe,
    one_of,
)

LASTING = {"began": maybe(SECONDS), "ended": maybe(SECONDS)}
ATTEMPT = keyed(
    number=COUNT,
    job=maybe(TEXT),
    restart=maybe(COUNT),
    # Of SLURM alone they are in its short form, as one text
    hosts=maybe(one_of(array(TEXT), TEXT)),
    ranks=maybe(COUNT),
    **LASTING,
    ready=maybe(SECONDS),
    from_step=maybe(COUNT),
    step=COUNT,
    steps=COUNT,
    skipped=COUNT,
    lost_steps=COUNT,
    lost_s=NUMBER,
    evaluations=COUNT,
    saves=COUNT,
    code=maybe({"type": "integer"}),
    cause=maybe(TEXT),
    why=TEXT,
    failed=FLAG,
    classes=by_name(NUMBER),
)
SAVES = keyed(count=COUNT, not_committed=COUNT, blocked_s=maybe(NUMBER), write_s=maybe(NUMBER), bytes=maybe(COUNT))
FAILURES = keyed(
    count=COUNT,
    exposure_s=NUMBER,
    mtbf_s=maybe(NUMBER),
    mtbf_90_s=array(NUMBER),
    expected_mtbf_s=NUMBER,
    restart_s=NUMBER,
)
INTERVAL = keyed(best_s=NUMBER, chosen_s=NUMBER, best_steps=maybe(COUNT), chosen_steps=maybe(COUNT), cost=NUMBER)
ROLL_BACK = {"t": maybe(SECONDS), "from": maybe(COUNT), "to": maybe(COUNT), "why": maybe(TEXT)}
# Of every run
COMMON = {
    "run": TEXT,
    "running": FLAG,
    "steps": maybe(COUNT),
    **LASTING,
    "lifetime_s": NUMBER,
    "goodput": NUMBER,
    "classes": by_name(NUMBER),
    "step_s": maybe(NUMBER),
}
WITH_EVENTS = keyed(
    **COMMON,
    source={"const": "events.jsonl"},
    ettr=NUMBER,
    step=COUNT,
    lost_steps=COUNT,
    data_wait_slowest_s=maybe(NUMBER),
    attempts=array(ATTEMPT),
    saves=SAVES,
    roll_backs=array(keyed(**ROLL_BACK)),
    faults=array(by_name(ANYTHING)),
    failures=FAILURES,
    interval=maybe(INTERVAL),
)
WITHOUT = keyed(**COMMON, source={"const": "metrics.jsonl"}, starts_in_slurm=COUNT)
ACCOUNT = one_of(WITH_EVENTS, WITHOUT)
