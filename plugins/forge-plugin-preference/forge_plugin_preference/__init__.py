"""Learning from preferences: losses over pairs of answers and over single ones, their data, and reward models.

A loss of your own derives from `PairLoss` (without a reference) or `ReferencePairLoss`, and has one method, `losses`.
"""

from forge_plugin_preference.answers import Answers
from forge_plugin_preference.base import PairLoss, PreferenceLoss, ReferencePairLoss
from forge_plugin_preference.bradley_terry import BradleyTerry
from forge_plugin_preference.evaluation import Preferences
from forge_plugin_preference.kto import KTO
from forge_plugin_preference.losses import DPO, IPO, ORPO, SimPO
from forge_plugin_preference.pairs import Pairs
from forge_plugin_preference.reward_head import RewardHead

__all__ = [
    "DPO",
    "IPO",
    "KTO",
    "ORPO",
    "Answers",
    "BradleyTerry",
    "PairLoss",
    "Pairs",
    "PreferenceLoss",
    "Preferences",
    "ReferencePairLoss",
    "RewardHead",
    "SimPO",
]
