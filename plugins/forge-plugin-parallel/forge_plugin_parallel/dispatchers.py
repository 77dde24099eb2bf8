"""The kind `dispatcher`, and its components `all_to_all` and `all_gather`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import frozen

from forge_core.contracts.components import Component
from forge_core.contracts.errors import Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_kit.nn.dispatch import ExpertRanks, TokenDispatcher


@frozen(kw_only=True)
class DispatcherComponent(Component):
    """Builds what moves tokens to the ranks that hold their experts, and results back, for the stage `ep`.

    It is a `forge_kit.nn.dispatch.TokenDispatcher`. Tokens, weights and choices are those of a rank after routing,
    capacity included, under every layout that `ep` accepts: with `tp`, a rank's tokens and its part of each expert's
    matrices; with `cp`, the tokens of its part of a sequence. With `ranks_per_node`, one is built for the ranks of a
    node and another for the nodes.
    """

    kind = "dispatcher"

    def rank_problems(self, degree: int, ranks_per_node: int) -> Iterable[Problem]:
        """Yields problems with the numbers of ranks of `ep`; paths are relative to this component's table."""
        return ()

    def build(self, context: BuildContext, ranks: ExpertRanks) -> TokenDispatcher:
        """Build for ranks that share experts.

        Raises:
            JobError: it cannot run on `context.device`, or with these ranks.
        """
        raise NotImplementedError


@frozen(kw_only=True)
class AllToAll(DispatcherComponent):
    """Sends a token once to each rank that holds any of its experts, and one sum back."""

    def build(self, context: BuildContext, ranks: ExpertRanks) -> TokenDispatcher:
        """Returns an `AllToAllDispatcher`."""
        from forge_plugin_parallel.ep_all_to_all import AllToAllDispatcher

        return AllToAllDispatcher(ranks)


@frozen(kw_only=True)
class AllGather(DispatcherComponent):
    """Gathers the tokens of all ranks on each, and adds results up by reduce-scatter.

    For few ranks, or tokens with experts on nearly all of them: then it sends as much as `all_to_all`, in collectives
    of equal sizes. A rank's memory for tokens in flight grows with the number of ranks.
    """

    def build(self, context: BuildContext, ranks: ExpertRanks) -> TokenDispatcher:
        """Returns an `AllGatherDispatcher`."""
        from forge_plugin_parallel.ep_all_gather import AllGatherDispatcher

        return AllGatherDispatcher(ranks)
