"""The sink `store`: keeps samples on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import ge

from forge_plugin_taps.kinds import SinkComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_taps.kinds import Sink, TapsInfo


@frozen(kw_only=True)
class Store(SinkComponent):
    """Writes the samples of each step to a folder `taps/step-N` of the run.

    It has a safetensors file for each point, in order of row and position; `tokens.safetensors`, with the facts about
    each sample; and `taps.json`, with shapes and SHA-256 of all. Equal values make equal files under every layout.
    """

    keep: int = field(default=0, validator=ge(0))
    """Newest steps that are kept; 0: all."""
    on_error: Literal["warn", "fail"] = "warn"
    """What follows when a step cannot be written, as the disk is full, say. warn: the step is left out, with a warning,
    and the training continues. fail: the training ends."""

    def build(self, context: BuildContext, taps: TapsInfo) -> Sink:
        """Imports torch only here: a job is checked without it."""
        from forge_plugin_taps.store_writer import StoreWriter

        return StoreWriter(self, context, taps)
