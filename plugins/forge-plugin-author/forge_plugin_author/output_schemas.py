"""JSON Schemas (2020-12) of what commands print with `--json`, for programs that read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
# JSON has no NaN and no infinity: `print_json` writes them as texts
NUMBER: Schema = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
SECONDS: Schema = {"type": "number"}
ANYTHING: Schema = {}


def table(**keys: Schema) -> Schema:
    """An object that has all these keys. Further ones may come with a later version, and are no error."""
    return {"type": "object", "properties": keys, "required": [*keys]}


def array(item: Schema) -> Schema:
    """An array of any length."""
    return {"type": "array", "items": item}


def by_name(value: Schema) -> Schema:
    """An object whose keys are names of things, such as paths of a job."""
    return {"type": "object", "additionalProperties": value}


def maybe(schema: Schema) -> Schema:
    """A value, or null where it is not known or does not exist."""
    return {"anyOf": [schema, {"type": "null"}]}


# As `forge_core.contracts.run_end.End` writes it
END = table(
    code={"type": "integer"},
    cause=TEXT,
    reason=TEXT,
    final=FLAG,
    signal=TEXT,
    step=maybe(COUNT),
    rank=COUNT,
    host=TEXT,
    attempt=TEXT,
    started=maybe(SECONDS),
    ended=SECONDS,
)
PROBLEM = table(file=TEXT, line=maybe(COUNT), key=TEXT, message=TEXT, id=TEXT, suggestion=maybe(TEXT))
# Without `--data` and with problems, `check` leaves out what it does not know
CHECK = table(ok=FLAG, files=array(TEXT), problems=array(PROBLEM)) | {
    "if": {"properties": {"ok": {"const": True}}},
    "then": {"required": ["layout", "components", "distributions"]},
}
CHECK["properties"] |= {
    "layout": TEXT,
    "components": by_name(TEXT),
    "distributions": by_name(TEXT),
    "data": by_name(ANYTHING),
    "decoded": by_name(ANYTHING),
}
KEY = table(
    name=TEXT, type=TEXT, choices=array(ANYTHING), required=FLAG, default=TEXT, must=array(TEXT), doc=TEXT
)  # fmt: skip
EXPLAIN = table(path=TEXT, doc=TEXT, types=array(TEXT), keys=array(KEY), fix=TEXT, page=TEXT)
# Without a step that can be simulated, `failure` has the reason, and figures are null
RANK = table(
    rank=COUNT,
    pipeline_rank=COUNT,
    state=by_name(COUNT),
    peak=maybe(COUNT),
    most=maybe(by_name(NUMBER)),
    at_peak=maybe(by_name(NUMBER)),
    flops=maybe(NUMBER),
    sent=maybe(array(table(along=TEXT, kind=TEXT, times=COUNT, bytes=NUMBER))),
    seconds_at_least=maybe(by_name(NUMBER)),
    latency=maybe(by_name(NUMBER)),
    launches=maybe(COUNT),
    compiled=FLAG,
    failure=TEXT,
)
PLAN = table(
    world_size=COUNT,
    layout=TEXT,
    device=TEXT,
    precision=TEXT,
    parameters=COUNT,
    trained_parameters=COUNT,
    tokens=COUNT,
    micro_batches=COUNT,
    micro_batch_size=COUNT,
    model_flops=maybe(NUMBER),
    gpu=maybe(TEXT),
    gpu_memory=maybe(NUMBER),
    calibration=maybe({"type": "object"}),
    lines=array(table(title=TEXT, text=TEXT)),
    ranks=array(RANK),
)
RUN = table(
    run=TEXT,
    state=TEXT,
    life=maybe(TEXT),
    last_line_s=maybe(SECONDS),
    step_s=maybe(SECONDS),
    owner=TEXT,
    step=maybe(COUNT),
    steps=maybe(COUNT),
    loss=maybe(NUMBER),
    held_out_loss=maybe(NUMBER),
    evaluation=maybe(by_name(NUMBER)),
    evaluated=maybe(COUNT),
    tokens=maybe(COUNT),
    updated=maybe(SECONDS),
    size=COUNT,
    checkpoints=array(COUNT),
    ended=TEXT,
    end=maybe(END),
    problem=TEXT,
)
CHECKPOINT_OF_RUN = table(
    step=COUNT, saved=maybe(SECONDS), tokens=maybe(COUNT), evaluation=maybe(by_name(NUMBER))
)  # fmt: skip
# All of `runs`, and more; its checkpoints are objects instead of steps
SHOW = table(
    **RUN["properties"]
    | {
        "checkpoints": array(CHECKPOINT_OF_RUN),
        "job": by_name(ANYTHING),
        "components": by_name(TEXT),
        "versions": by_name(TEXT),
        "metrics": by_name(ANYTHING),
        "files": by_name(COUNT),
        "started_in": TEXT,
        "next": TEXT,
    }
)
CHECKPOINT = table(
    step=COUNT,
    saved=maybe(SECONDS),
    size=COUNT,
    tokens=maybe(COUNT),
    evaluation=maybe(table(step=COUNT, metrics=by_name(NUMBER))),
    base=maybe(ANYTHING),
    merged=maybe(ANYTHING),
    faults=array(TEXT),
)
CHECKPOINTS = table(run=TEXT, checkpoints=array(CHECKPOINT))
# Only the list has these
CHECKPOINTS["properties"] |= {"in_use_by": TEXT, "unfinished": array(ANYTHING)}
# Of several seeds, figures are means
ROW = table(
    label=TEXT,
    job=TEXT,
    settings=by_name(ANYTHING),
    runs=array(TEXT),
    ended=TEXT,
    ordered_by={"enum": ["held_out", "mean_loss"]},
    difference=maybe(NUMBER),
    held_out=maybe(NUMBER),
    held_out_std=maybe(NUMBER),
    loss=maybe(NUMBER),
    mean_loss=maybe(NUMBER),
    steps=maybe(COUNT),
    tokens=maybe(NUMBER),
    step_seconds=maybe(NUMBER),
    cpu_seconds=maybe(NUMBER),
    peak_memory=maybe(NUMBER),
)
COMPARE = table(rows=array(ROW), failed=array(table(label=TEXT, run=TEXT, ended=TEXT)))
PLUGIN = table(
    kind=TEXT,
    type=TEXT,
    distribution=TEXT,
    version=TEXT,
    target=TEXT,
    editable=TEXT,
    conflict=TEXT,
    check=maybe(table(error=TEXT, seconds=NUMBER, torch=FLAG, problems=array(TEXT))),
    distribution_problems=array(TEXT),
)
GENERATE = table(
    run=TEXT,
    checkpoint=TEXT,
    step=COUNT,
    texts=array(table(prompt=TEXT, text=TEXT, ids=array(COUNT))),
)
SKILL = table(name=TEXT, description=TEXT, packages=array(TEXT), missing=array(TEXT), folder=TEXT)

SKILLS_INSTALLED = table(folder=TEXT, skills=array(TEXT), missing=by_name(array(TEXT)))
COMPUTED = table(loss=NUMBER, grad_norm=maybe(NUMBER), gradients=ANYTHING)
REPLAY = table(
    run=TEXT,
    step=COUNT,
    recorded=COMPUTED,
    again=COMPUTED,
    cause={"enum": ["hardware", "data", "weights", None]},
    verdict=TEXT,
    sequences=COUNT,
    worst=array(table(loss=NUMBER, source=TEXT, text=TEXT)),
)
REPORT = table(out=TEXT, bytes=COUNT, runs=array(TEXT))
SPLIT = table(documents=COUNT, tokens=COUNT, bytes=COUNT, files=array(TEXT))
# Without `--part`, which prints figures of that part
PREPARE = table(
    out=TEXT,
    splits=table(train=SPLIT, held_out=SPLIT),
    kept=by_name(COUNT),
    dropped=by_name(table(count=COUNT, examples=array(TEXT))),
    tokenizer={"type": "object"},
)
CLEANING_STEP = table(
    step=TEXT, documents=COUNT, removed=COUNT, changed=COUNT, characters_removed=COUNT, reasons=by_name(COUNT)
)  # fmt: skip
BEGUN = {"format": COUNT, "arguments": by_name(ANYTHING), "inputs": TEXT}
CLEANED = {
    **BEGUN,
    "stage": TEXT,
    "documents": COUNT,
    "characters": COUNT,
    "unreadable": by_name(COUNT),
    "steps": array(CLEANING_STEP),
    "kept": COUNT,
    "kept_characters": COUNT,
}
# With `[slurm]`, as long as tasks are not complete
QUEUED = table(queued=by_name(COUNT), job=TEXT)
RECORD = table(id=TEXT, stage=TEXT, step=TEXT, origin=ANYTHING)
RECORD["properties"] |= {
    "reason": TEXT,
    "characters": COUNT,
    "detail": TEXT,
    "minhash_cluster_id": {"type": "integer"},
    "contaminated_task": TEXT,
    "contaminated_ngram": TEXT,
    "removed_ranges": array(array(COUNT)),
}
# Of `--why`
KEPT = table(id=TEXT, kept=table(file=TEXT, line=COUNT, origin=ANYTHING))
KEPT["properties"] |= {"changed": array(RECORD)}
REMOVED = table(id=TEXT, removed=array(RECORD))
REMOVED["properties"] |= {"changed": array(RECORD)}
DEDUP = table(**CLEANED, memory=by_name(COUNT))
DEDUP["properties"] |= {"found": by_name(NUMBER)}
OVERLAP = table(items=COUNT, short_items=COUNT, n_grams=COUNT, documents=COUNT, n_grams_found=COUNT)
FIGURES = table(total=NUMBER, mean=NUMBER, std=NUMBER, min=NUMBER, max=NUMBER)
STATS = table(**BEGUN, source=TEXT, documents=COUNT, unreadable=by_name(COUNT), statistics=by_name(FIGURES))
TOKEN = table(id=COUNT, text=TEXT)
LIKELY = table(id=COUNT, text=TEXT, probability=NUMBER)
POSITION = table(position=COUNT, divergence=NUMBER, entropy=NUMBER, top=array(LIKELY))
OF_PROMPT = {"run": TEXT, "checkpoint": TEXT, "step": COUNT, "prompt": TEXT, "tokens": array(TOKEN), "picture": TEXT}
LENS = table(**OF_PROMPT, layers=array(table(point=TEXT, positions=array(POSITION))))
HEAD = table(layer=TEXT, head=COUNT, entropy=NUMBER, itself=NUMBER, before=NUMBER, first=NUMBER)
ATTENTION = table(**OF_PROMPT, heads=array(HEAD))

SCHEMAS: Mapping[str, Schema] = {
    "check": CHECK,
    "checkpoints": CHECKPOINTS,
    "compare": COMPARE,
    "data decontaminate": {"anyOf": [table(**CLEANED, tasks=by_name(OVERLAP)), QUEUED]},
    "data dedup": {"anyOf": [DEDUP, QUEUED]},
    "data filter": {"anyOf": [table(**CLEANED), KEPT, REMOVED, QUEUED]},
    "data prepare": PREPARE,
    "data stats": {"anyOf": [STATS, QUEUED]},
    "explain": EXPLAIN,
    "generate": GENERATE,
    "inside attention": ATTENTION,
    "inside lens": LENS,
    "plan": PLAN,
    "plugins": array(PLUGIN),
    "replay": REPLAY,
    "report": REPORT,
    "runs": array(RUN),
    "show": SHOW,
    "skills install": SKILLS_INSTALLED,
    "skills list": array(SKILL),
}
"""By command. `checkpoints` is of the list and of `verify`, and not of its other actions."""
