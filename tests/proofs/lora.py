"""Low-rank adapters (Hu et al. 2021): a trained model learns something new by a few parameters beside its matrices.

    [checkpoint.load]
    path = "runs/base"
    exclude = ["*.lora.*"]      # they begin here

    [plugins.lora]
    type = "./lora.py:LoRA"
    rank = 8

What was learnt can be added to the matrices, which gives a model of the shape that it had before:

    forge-run checkpoints runs/adapted export --out adapted.safetensors
    python lora.py adapted.safetensors merged.safetensors
"""

from __future__ import annotations

import sys
import tomllib
from collections import OrderedDict
from fnmatch import fnmatchcase

from attrs import define, field
from attrs.validators import gt
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from forge_core import JobError, Plugin, Problem, hookimpl
from forge_kit.nn.modules import Linear

A, B = ".lora.a.weight", ".lora.b.weight"


@define(kw_only=True, slots=False)
class LoRA(Plugin):
    """Freezes the model, and adds alpha / rank B A to each chosen matrix, where only A and B are trained.

    They are parameters of their own beside the matrix: `X.weight` stays `X.weight`, and there are `X.lora.a.weight`
    (rank, in) and `X.lora.b.weight` (out, rank). B starts at zero, so training starts from the model as it was. No plan
    names them, so the stage `tp` refuses them.
    """

    resumes_as = "impossible"

    rank: int = field(default=8, validator=gt(0))
    """Rows of A and columns of B."""
    alpha: float = field(default=16.0, validator=gt(0))
    """What is added is scaled by alpha / rank."""
    match: str = "layers.*"
    """Pattern of the names of linear modules that are adapted."""

    @hookimpl(wrapper=True)
    def forge_build_model(self):
        model = yield
        model.requires_grad_(False)
        linears = {f"layers.{name}": m for name, m in model.layers.named_modules() if isinstance(m, Linear)}
        chosen = [name for name in linears if fnmatchcase(name, self.match)]
        if not chosen:
            fix = f"there are {', '.join(linears)}" if linears else "the model has no forge_kit.nn.modules.Linear"
            raise JobError([Problem("plugins.lora.match", f"{self.match!r} fits no matrix of the layers; {fix}")])
        for name in chosen:
            self._adapt(linears[name])
        return model

    def _adapt(self, linear: Linear) -> None:
        a = Linear(linear.in_features, self.rank, std=linear.in_features**-0.5)
        b = Linear(self.rank, linear.out_features, std=0.0)
        scale = self.alpha / self.rank
        linear.lora = nn.Sequential(OrderedDict(a=a, b=b))
        linear.register_forward_hook(lambda module, inputs, output: output + scale * module.lora(inputs[0]))


def merge(source: str, target: str) -> None:
    """Read a file that `checkpoints … export` wrote, and write it with every W + alpha / rank B A in the place of W."""
    with safe_open(source, "pt") as file:
        metadata, weights = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    plugins = tomllib.loads(metadata["job"]).get("plugins", {}).values()
    settings = next((table for table in plugins if table["type"].endswith(":LoRA")), None)
    if settings is None:
        sys.exit(f"{source} has no adapters: the job that trained it names no LoRA under [plugins]")
    for name in [name.removesuffix(A) for name in weights if name.endswith(A)]:
        update = weights.pop(name + B) @ weights.pop(name + A)
        weights[f"{name}.weight"] += settings["alpha"] / settings["rank"] * update
    save_file(weights, target, {"format": "pt"})


if __name__ == "__main__":
    merge(*sys.argv[1:])
