"""Orthogonalised momentum for matrices: the optimizers `muon`, `normuon` and `dion`, and the plugin `qk_clip`."""

from forge_plugin_muon.dion import Dion
from forge_plugin_muon.muon import Muon
from forge_plugin_muon.normuon import NorMuon
from forge_plugin_muon.qk_clip import QKClip

__all__ = ["Dion", "Muon", "NorMuon", "QKClip"]
