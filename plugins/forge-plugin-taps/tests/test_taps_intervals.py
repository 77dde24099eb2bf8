"""Each sink receives its own steps."""

from __future__ import annotations

from attrs import frozen

from forge_core.engine.trainer import Trainer
from forge_plugin_taps import Sink, SinkComponent, Taps
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.refusals import refuses

received: dict[str, list[int]] = {}


@frozen(kw_only=True)
class Steps(SinkComponent):
    """Notes the steps that it receives."""

    name: str

    def build(self, context, taps):
        assert taps.interval == (self.interval or 3)
        received[self.name] = []
        return Noting(self.name)


class Noting(Sink):
    def __init__(self, name):
        self.steps = received[name]

    def consume(self, sample):
        assert len(sample) == 4 * 2
        self.steps.append(sample.step)


def job(tmp_path, catalog, **sinks):
    return tiny_job(
        str(tmp_path),
        catalog,
        model=Transformer(vocab_size=32, dim=16, layers=1, attention=GroupedQueryAttention(heads=2)),
        data={"sources": (Numbers(ignored=1, held_out=5),)},
        steps=9,
        parallel={"taps": Taps(interval=3, positions=2, sinks=sinks)},
    )


def test_a_sink_has_its_own_interval_and_first_step(tmp_path, catalog):
    sinks = {
        "all": Steps(name="all"),
        "often": Steps(name="often", interval=2),
        "late": Steps(name="late", first_step=7),
    }
    Trainer(job(tmp_path, catalog, **sinks)).run()
    assert received == {"all": [3, 6, 9], "often": [2, 4, 6, 8], "late": [9]}


def test_a_sink_that_would_receive_nothing_is_refused(tmp_path, catalog):
    with refuses("parallel.taps.sinks.late.interval", "step from 8", "train.steps 9", 10):
        Trainer(job(tmp_path, catalog, late=Steps(name="late", first_step=8, interval=10))).run()
