"""The sink `store`: keeps samples on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from forge_plugin_taps.kinds import SinkComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_taps.kinds import Sink, TapsInfo


@frozen(kw_only=True)
class Store(SinkComponent):
    """Writes the samples of each step to a folder `taps/step-N` of the run: a safetensors file for each point.

    Equal values make equal files under every layout.
    """

    def build(self, context: BuildContext, taps: TapsInfo) -> Sink:
        from forge_plugin_taps.store_writer import StoreWriter

        return StoreWriter(self, context, taps)
