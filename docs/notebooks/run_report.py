# %% [markdown]
# A report on two runs, as one HTML file that loads nothing from anywhere: it can be mailed, kept beside a paper, or
# opened years later.

# %%
import json
import random
import subprocess
import sys
from pathlib import Path

from forge_core import Trainer, load_job

random.seed(0)
pairs = [(random.randrange(100), random.randrange(100)) for _ in range(2000)]
texts = [f"{a} + {b} = {a + b}" for a, b in pairs]
Path("sums.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
job = {
    "train": {"steps": 40, "global_batch_size": 16, "seq_len": 32},
    "model": {
        "type": "transformer",
        "dim": 32,
        "layers": 2,
        "attention": {"heads": 2},
        "ffn": {"type": "moe", "experts": 4, "hidden": 32, "router": {"type": "softmax_topk", "top_k": 1}},
    },
    "optimizer": {"type": "adamw", "lr": 1e-2},
    "scheduler": {"type": "constant"},
    "data": {
        "tokenizer": {"type": "bytes"},
        "sources": [{"type": "text", "path": "sums.jsonl", "held_out_every": 20}],
    },
    "eval": {"interval": 20},
    "parallel": {
        "taps": {"interval": 10, "points": ["layers.*.resid_post"], "sinks": {"statistics": {"type": "statistics"}}}
    },
    "hooks": {"goodput": {}},
    "loggers": {"console": {"style": "off"}, "jsonl": {}},
}
runs = []
for name, router in (("softmax", "softmax_topk"), ("sigmoid", "sigmoid_topk")):
    layered = load_job(job, overrides={"job.name": name, "model.ffn.router.type": router})
    runs.append(Trainer(layered, echo=lambda text: None).run().folder)

# %% [markdown]
# ## The page
#
# `forge-run report RUN...` writes it. Each section comes from a distribution, the plan or the goodput for example,
# and is left out where a run has nothing for it.

# %%
command = [sys.executable, "-m", "forge_core", "report", *map(str, runs), "--out", "report.html"]
subprocess.run(command, check=True, capture_output=True)
page = Path("report.html").read_text()
print(f"{len(page) / 1000:.0f} kB")
assert "Content-Security-Policy" in page  # which forbids the browser to load anything
assert 'src="http' not in page

# %% [markdown]
# ## The same as Markdown
#
# For a terminal, a pull request or a notebook.

# %%
command = [sys.executable, "-m", "forge_core", "report", *map(str, runs), "--out", "report.md"]
subprocess.run(command, check=True, capture_output=True)
text = Path("report.md").read_text()
print("\n".join(line for line in text.splitlines() if line.startswith("#")))
assert "## Experts and other counts" in text
