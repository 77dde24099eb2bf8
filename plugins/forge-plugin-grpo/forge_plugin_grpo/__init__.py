"""Reinforcement learning with verifiable rewards: loss `grpo`, dataset `prompts`, reward `answer`, rollout `engine`."""

from forge_plugin_grpo.evaluation import Rewards
from forge_plugin_grpo.grpo import GRPO
from forge_plugin_grpo.kinds import Completion, RewardComponent, RolloutComponent, Sampler
from forge_plugin_grpo.prompts import Prompts
from forge_plugin_grpo.reward_model import RewardModel
from forge_plugin_grpo.rewards import Answer
from forge_plugin_grpo.rollout import EngineRollout

__all__ = [
    "GRPO",
    "Answer",
    "Completion",
    "EngineRollout",
    "Prompts",
    "RewardComponent",
    "RewardModel",
    "Rewards",
    "RolloutComponent",
    "Sampler",
]
