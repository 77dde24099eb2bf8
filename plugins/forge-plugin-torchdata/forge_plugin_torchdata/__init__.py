"""Loading by torchdata: the loader `nodes` and the dataset `pipeline`."""

from forge_plugin_torchdata.torchdata import Nodes, Pipeline, PipelineLane

__all__ = ["Nodes", "Pipeline", "PipelineLane"]
