"""Learning from preferences: losses `dpo`, `ipo`, `simpo`, `orpo`, `kto`, dataset `pairs`, evaluation `preferences`.

A loss of your own derives from `PairLoss` (without a reference) or `ReferencePairLoss`, and has one method, `losses`.
"""

from forge_plugin_preference.answers import Answers
from forge_plugin_preference.base import PairLoss, PreferenceLoss, ReferencePairLoss
from forge_plugin_preference.evaluation import Preferences
from forge_plugin_preference.kto import KTO
from forge_plugin_preference.losses import DPO, IPO, ORPO, SimPO
from forge_plugin_preference.pairs import Pairs

__all__ = [
    "DPO",
    "IPO",
    "KTO",
    "ORPO",
    "Answers",
    "PairLoss",
    "Pairs",
    "PreferenceLoss",
    "Preferences",
    "ReferencePairLoss",
    "SimPO",
]
