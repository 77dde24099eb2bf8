"""A model that knows only forge-kit's declaration of points, and jobs of it."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from forge_core.engine.trainer import Trainer
from forge_kit.nn.taps import TapPoint
from forge_plugin_sae import SAE, TopK
from forge_plugin_taps import Taps
from forge_testing import SplittableModel, tiny_job
from forge_testing.tiny import VOCABULARY
from forge_testing.tiny_model import SplittableNetwork


class Network(SplittableNetwork):
    def tap_points(self) -> Mapping[str, TapPoint]:
        points = {}
        for name in self.layers:
            points[f"layers.{name}.resid_pre"] = TapPoint(f"layers.{name}", "carry_in")
            points[f"layers.{name}.mlp_out"] = TapPoint(f"layers.{name}.pair")
            points[f"layers.{name}.resid_post"] = TapPoint(f"layers.{name}", "carry_out")
        return points


@frozen(kw_only=True)
class Stranger(SplittableModel):
    def build(self, context):
        return Network(self.dim, self.layers, VOCABULARY, context.dtype)


def sae(**keys):
    """Small enough to learn from a few hundred rows, in float64."""
    defaults = {"activation": TopK(k=3), "latents": 24, "lr": 0.01, "warmup": 4, "batch": 32, "buffer": 64}
    return SAE(**{**defaults, "dead_after": 96, "precision": "fp64", "points": ("*.resid_post",), **keys})


def job(folder, parallel=None, sinks=None, taps=None, **changes):
    settings = {"interval": 1, "positions": "all", "points": ("layers.*",), **(taps or {})}
    stage = Taps(sinks={"sae": sae()} if sinks is None else sinks, **settings)
    defaults = {"steps": 8, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp64"}
    changes = {**defaults, **changes, "job": {"name": "run", **changes.get("job", {})}}
    return tiny_job(str(folder), None, model=Stranger(), parallel={"taps": stage, **(parallel or {})}, **changes)


def run(made):
    return Trainer(made, echo=lambda text: None).run().folder
