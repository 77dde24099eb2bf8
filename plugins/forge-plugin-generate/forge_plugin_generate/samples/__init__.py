"""Text sampled during training: type `samples` of kind `hook`."""

from forge_plugin_generate.samples.samples import Samples

__all__ = ["Samples"]
