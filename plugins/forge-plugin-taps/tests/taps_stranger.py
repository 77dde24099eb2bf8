"""A model that knows only forge-kit's declaration of points, and jobs of it."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from forge_core.engine.trainer import Trainer
from forge_kit.nn.taps import TapPoint
from forge_plugin_taps import Taps
from forge_testing import Numbers, SplittableModel, tiny_job
from forge_testing.tiny import VOCABULARY
from forge_testing.tiny_model import SplittableNetwork


class Network(SplittableNetwork):
    def tap_points(self) -> Mapping[str, TapPoint]:
        points = {}
        for name in self.layers:
            points[f"layers.{name}.resid_post"] = TapPoint(f"layers.{name}", "carry_out")
            points[f"layers.{name}.mlp_hidden"] = TapPoint(f"layers.{name}.pair.down", "input", axes="hidden")
        return points


@frozen(kw_only=True)
class Stranger(SplittableModel):
    def build(self, context):
        return Network(self.dim, self.layers, VOCABULARY, context.dtype)


def job(folder, catalog=None, parallel=None, points=("layers.*",), positions=3, interval=2, sinks=None, **changes):
    taps = Taps(interval=interval, positions=positions, points=points, sinks=sinks or {})
    defaults = {"steps": 6, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp64"}
    changes = {"data": {"sources": (Numbers(ignored=1),)}, **defaults, **changes}
    changes["job"] = {"name": "run", **changes.get("job", {})}
    changes = {"model": Stranger(), **changes}
    return tiny_job(str(folder), catalog, parallel={"taps": taps, **(parallel or {})}, **changes)


def run(made, **options):
    return Trainer(made, echo=lambda text: None, **options).run().folder


def rows(tokens):
    """A target of one's own: the row."""
    return tokens["row"]
