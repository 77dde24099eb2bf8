"""Orthogonalised momentum for matrices: types `muon`, `normuon` and `dion` of kind `optimizer`."""

from forge_plugin_muon.dion import Dion
from forge_plugin_muon.muon import Muon
from forge_plugin_muon.normuon import NorMuon

__all__ = ["Dion", "Muon", "NorMuon"]
