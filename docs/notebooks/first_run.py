# %% [markdown]
# Everything is imported from `forge_core`. The data here are made on the spot: 2,000 short documents, sums of two
# numbers.

# %%
import json
import random
from pathlib import Path

from forge_core import Trainer, TrainingHook, load_job, load_model, read_metrics

random.seed(0)
pairs = [(random.randrange(100), random.randrange(100)) for _ in range(2000)]
texts = [f"{a} + {b} = {a + b}" for a, b in pairs]
Path("sums.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

# %% [markdown]
# ## Train
#
# A job is a dict with the tables and keys of a [job file](../job-file.md). `Trainer` takes it as it is; a path to a
# file, or the text of one, would do too. The run goes to the folder `runs/sums`.

# %%
job = {
    "job": {"name": "sums"},
    "train": {"steps": 40, "global_batch_size": 16, "seq_len": 32},
    "model": {"type": "transformer", "dim": 32, "layers": 2, "attention": {"heads": 2}},
    "optimizer": {"type": "adamw", "lr": 1e-2},
    "scheduler": {"type": "wsd", "warmup_steps": 5},
    "data": {
        "tokenizer": {"type": "bytes"},
        "sources": [{"type": "text", "path": "sums.jsonl", "held_out_every": 20}],
    },
    "eval": {"interval": 20},
}
summary = Trainer(job).run()
print(summary.folder, summary.step, summary.evaluation["eval/loss"])

# %% [markdown]
# ## Look at the metrics
#
# `summary.metrics()` has one dict for each step, and the evaluations apart. Both are what pandas
# takes: `pandas.DataFrame(metrics).plot(x="step", y="loss")`. `read_metrics` reads them from any run folder, also
# while the run goes on.

# %%
metrics = summary.metrics()
print([round(row["loss"], 2) for row in metrics][::8])
print([(row["step"], round(row["eval/loss"], 3)) for row in metrics.evaluations])
assert read_metrics("runs/sums") == metrics

# %% [markdown]
# ## Use the model
#
# `load_model` takes a run folder or a checkpoint. `generate` continues a text, or several as one batch.

# %%
model = load_model("runs/sums")
print(model.generate("12 + 34 =", max_tokens=12))
print(model.generate(["7 + 5 =", "70 + 5 ="], max_tokens=12, temperature=0))

# %% [markdown]
# Called with ids, the model returns logits in float32: a row for each position, about the token after it.

# %%
ids = model.tokenizer.encode("12 + 34 =")
logits = model(ids)
likeliest = logits[-1].softmax(-1).topk(3)
for probability, id_ in zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True):
    print(f"{probability:.2f} {model.tokenizer.decode([id_])!r}")

# %% [markdown]
# ## Compare two optimizers
#
# `load_job` layers dicts, texts and files from left to right; overrides come last and reach single keys. `echo`
# receives what a run prints before its first step. ([`forge-run compare`](../command-line.md#compare) does the same
# for grids.)

# %%
losses = {}
for optimizer in ({"type": "adamw", "lr": 1e-2}, {"type": "lion", "lr": 3e-3}):
    name = optimizer["type"]
    changed = load_job(
        job, overrides={"optimizer": optimizer, "job.name": f"sums-{name}", "loggers.console.style": "off"}
    )
    losses[name] = Trainer(changed, echo=lambda text: None).run().evaluation["eval/loss"]
print(losses)

# %% [markdown]
# ## Stop and resume
#
# A training hook sees every step. This one stops the run, which saves everything. The same job continues it, and its
# losses are exactly those of the run that was never stopped.


# %%
class StopAt(TrainingHook):
    """Stops after a number of steps."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, context):
        if context.step == self.step:
            context.request_stop("seen enough")


again = load_job(job, overrides={"job.name": "sums-again", "loggers.console.style": "off"})
stopped = Trainer(again, hooks=[StopAt(25)], echo=lambda text: None).run()
print(stopped.step, stopped.stopped)
assert stopped.step == 25

resumed = Trainer(again).run()
assert [row["loss"] for row in resumed.metrics()] == [row["loss"] for row in metrics]
