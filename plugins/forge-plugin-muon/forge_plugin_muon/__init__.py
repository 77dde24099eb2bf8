"""Muon, orthogonalised momentum for matrices: type `muon` of kind `optimizer`."""

from forge_plugin_muon.muon import Muon

__all__ = ["Muon"]
