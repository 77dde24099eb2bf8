"""Mixture-of-Transformers: fusion `mot` of `forge-plugin-vision`."""

from forge_plugin_mot.mot import MixtureOfTransformers

__all__ = ["MixtureOfTransformers"]
