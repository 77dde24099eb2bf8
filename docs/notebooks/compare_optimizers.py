# %% [markdown]
# Three optimizers on one model, data and seed: one key differs, and each takes its own learning rate. What it costs
# is counted as well: a step of Muon does more than one of AdamW.

# %%
import json
import random
from pathlib import Path

import matplotlib.pyplot as plt

from forge_core import Trainer, load_job

random.seed(0)
words = ["red", "green", "blue", "cat", "dog", "bird", "runs", "sleeps", "sings", "and", "then"]
stories = [" ".join(random.choices(words, k=24)) for _ in range(800)]
Path("stories.jsonl").write_text("".join(json.dumps({"text": story}) + "\n" for story in stories))
job = {
    "job": {"name": "optimizers"},
    "train": {"steps": 40, "global_batch_size": 8, "seq_len": 64},
    "model": {"type": "transformer", "dim": 48, "layers": 2, "attention": {"heads": 3}},
    "scheduler": {"type": "wsd", "warmup_steps": 6},
    "data": {
        "tokenizer": {"type": "bytes"},
        "sources": [{"type": "text", "path": "stories.jsonl", "held_out_every": 20}],
    },
    "eval": {"interval": 20},
    "loggers": {"console": {"style": "off"}},
}
optimizers = {
    "adamw": {"type": "adamw", "lr": 3e-3},
    "lion": {"type": "lion", "lr": 1e-3},
    "muon": {"type": "muon", "lr": 2e-2},
}

# %% [markdown]
# ## Train each
#
# `load_job` lays the optimizer's table over the job. A mistake in it, a key of another optimizer say, would be an
# error before anything is built.

# %%
runs = {}
for name, optimizer in optimizers.items():
    layered = load_job(job, overrides={"optimizer": optimizer, "job.name": f"stories-{name}"})
    runs[name] = Trainer(layered, echo=lambda text: None).run()

# %% [markdown]
# ## Compare
#
# Every run saw the same samples in the same order, so differences are the optimizer's. Losses are compared on
# held-out text.

# %%
for name, run in runs.items():
    rows = run.metrics()
    seconds = sum(row["step_seconds"] for row in rows[5:]) / len(rows[5:])
    print(f"{name:6} held-out loss {run.evaluation['eval/loss']:.3f}, {1000 * seconds:.0f} ms a step")

# %%
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for name, run in runs.items():
    evaluations = run.metrics().evaluations
    axes.plot([row["step"] for row in evaluations], [row["eval/loss"] for row in evaluations], "o-", label=name)
axes.set(xlabel="step", ylabel="held-out loss")
axes.legend(frameon=False)
figure.savefig("optimizers.png", dpi=150)

# %% [markdown]
# One seed and one rate are a sketch and no comparison. `forge-run compare` does it properly, over grids of rates and
# several seeds, with a table and a picture, resumable, several at a time:
#
#     forge-run compare job.toml --set optimizer.lr=1e-3,3e-3 --set job.seed=1,2,3 --out compared
#
# The first line of each run is the same to the bit: the loss before any update.

# %%
first = {run.metrics()[0]["loss"] for run in runs.values()}
assert len(first) == 1
assert all(run.evaluation["eval/loss"] < run.metrics()[0]["loss"] - 0.5 for run in runs.values())
