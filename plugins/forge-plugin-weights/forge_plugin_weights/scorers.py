"""Published models that score a text by one number, such as reward models: `AutoModelForSequenceClassification`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from forge_core.contracts.errors import JobError, Problem
from forge_core.plugins.catalog import Catalog
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Flat, Rule
from forge_plugin_weights.rules import Same

LANGUAGE_MODEL, SCORER = "ForCausalLM", "ForSequenceClassification"
"""Ends of the names of the two classes that `transformers` has for one `model_type`."""
CLASSES = frozenset(
    f"{name}{LANGUAGE_MODEL}"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Gemma", "Gemma2", "Phi3", "Mixtral", "Qwen3Moe")
)
"""Architectures whose classes for scores have the score of the last token, by a matrix without a bias."""
SCORE = "head.score.weight"
"""Name of the vector in a model with the plugin below."""
PLUGIN, TABLE = "forge-plugin-preference/reward_head", {"reward_head": {"type": "forge-plugin-preference/reward_head"}}
"""The plugin that gives a model this head; and the table `[plugins]` of a job with it."""


def is_scorer(config: Config) -> bool:
    """Whether a configuration is of a model that scores texts, by the class that it names."""
    named = config.get("architectures")
    return isinstance(named, list) and len(named) == 1 and str(named[0]).endswith(SCORER)


def scorer(architecture: ArchitectureComponent) -> ArchitectureComponent:
    """Returns the architecture with one score in place of the head of a language model.

    Raises:
        JobError: `transformers` has no such class for it, or one that is not known here.
    """
    if architecture.name not in CLASSES:
        known = ", ".join(sorted(name.replace(LANGUAGE_MODEL, SCORER) for name in CLASSES))
        message = f"{architecture.name} with a score in place of its head is not known; known are {known}"
        raise JobError([Problem("architectures", message)])
    base: Any = type(architecture)
    chosen: ArchitectureComponent = _scorer_of(base)()
    return chosen


@cache
def _scorer_of(base: Any) -> Any:
    """The class of an architecture with a score, one for each class of an architecture."""

    def rules(self: Any, model: Flat) -> Sequence[Rule]:
        return (*base.rules(self, model), Same(SCORE, "score.weight"))

    def start_tables(self: Any, model: Mapping[str, Any], load: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**base.start_tables(self, model, load), "plugins": TABLE}

    members = {
        "__doc__": f"{base.name} with one score in place of its head.",
        "__module__": __name__,
        "name": base.name.replace(LANGUAGE_MODEL, SCORER),
        "harmless": (*base.harmless, "num_labels"),
        "purpose": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},  # by which transformers counts labels
        "plugins": TABLE,
        "rules": rules,
        "start_tables": start_tables,
    }
    return type(f"{base.__name__}Scorer", (base,), members)


def check_installed(catalog: Catalog) -> None:
    """Raise a `JobError` if the plugin is not installed that gives a model such a head."""
    if not any(offer.qualified == PLUGIN for offer in catalog.offers("plugin")):
        message = "a model that scores texts needs the plugin reward_head: pip install forge-plugin-preference"
        raise JobError([Problem("architectures", message)])
