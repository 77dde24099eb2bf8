"""Language models of published vision-language models, without the rest: Gemma 3 from 4B on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

import attrs
from attrs import frozen

from forge_plugin_weights.architectures.gemma import Gemma3Text
from forge_plugin_weights.fields import REQUIRED, value_of
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Part, Rule, Shapes, Unsupported
from forge_plugin_weights.tables import HARMLESS

TEXT = "text_config"


@frozen(kw_only=True)
class Inner(Field):
    """A field of the language model, whose configuration is a table in that of the whole."""

    field: Field
    defaults: Config
    """Keys that files leave out."""

    @property
    def keys(self) -> Collection[str]:
        return (TEXT, *({"tie_word_embeddings"} & {*self.field.keys}))

    def read(self, config: Config) -> Flat:
        outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        return self.field.read({**self.defaults, **outer, **value_of(config, TEXT, REQUIRED)})

    def write(self, model: Flat) -> Config:
        return self.field.write(model)  # never exported, but how far a model is from it decides what a message says

    def resolve(self, model: Flat) -> Flat:
        return self.field.resolve(model)

    def remark(self, config: Config) -> str:
        return self.field.remark(value_of(config, TEXT, REQUIRED))


@frozen(kw_only=True)
class Incoming(Field):
    """The keys of the language model are all known; and nothing is exported, as the rest of it is not there."""

    known: Collection[str]
    exported_as: str

    def read(self, config: Config) -> Flat:
        if unknown := [key for key in value_of(config, TEXT, REQUIRED) if key not in self.known]:
            raise Unsupported(
                f"{TEXT} has {', '.join(unknown)}, which {'is' if len(unknown) == 1 else 'are'} not known"
            )
        return {}

    def write(self, model: Flat) -> Config:
        raise Unsupported(f"the model has no vision tower; its language model is exported as {self.exported_as}")


@frozen
class Prefixed:
    """A rule whose names of theirs have a prefix."""

    rule: Rule
    prefix: str

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        return [attrs.evolve(part, theirs=self.prefix + part.theirs) for part in self.rule.parts(name, shapes)]


@frozen(kw_only=True)
class Gemma3LanguageModel(ArchitectureComponent):
    """The language model of Gemma 3 4B, 12B and 27B, which an export writes as `gemma3_text`."""

    name = "Gemma3ForConditionalGeneration"
    harmless = (
        *("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
        *("boi_token_id", "eoi_token_id", "image_token_id"),
    )
    ignored = ("vision_tower.*", "multi_modal_projector.*")

    inner: ClassVar[ArchitectureComponent] = Gemma3Text()
    defaults: ClassVar[Config] = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}

    def fields(self) -> Sequence[Field]:
        inner = self.inner.fields()
        known = {*HARMLESS, *self.inner.harmless, *(key for field in inner for key in field.keys)}
        fields = (Inner(field=field, defaults=self.defaults) for field in inner)
        return (*fields, Incoming(known=known, exported_as="gemma3_text"))

    def rules(self, model: Flat) -> Sequence[Rule]:
        return [Prefixed(rule, "language_model.") for rule in self.inner.rules(model)]
