"""Fields and rules of models that consist of other published models, whose tables serve there as they are."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import attrs
import tomli_w
from attrs import field, frozen

from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_weights.architectures.vision_towers import Tower
from forge_plugin_weights.fields import REQUIRED, value_of
from forge_plugin_weights.keys_by_layer import ABSENT, with_pattern
from forge_plugin_weights.kinds import (
    PIXELS,
    TIED,
    ArchitectureComponent,
    Config,
    Field,
    Flat,
    InnerTable,
    Part,
    Rule,
    Shapes,
    Unsupported,
)
from forge_plugin_weights.tables import (
    Form,
    all_fields,
    architectures,
    fitting_forms,
    nested,
    preferred,
    read_fields,
    with_quantisation,
)
from forge_plugin_weights.vision_kinds import VisionLanguageArchitecture, VisionTowerArchitecture

TEXT, VISION = "text_config", "vision_config"
SEEING = (VisionLanguageArchitecture, VisionTowerArchitecture)
LANGUAGE = "language."
"""How keys of the language model begin."""

PLAIN_HEAD: Mapping[str, Any] = {"logit_soft_cap": 0, "logit_scale": 1.0}
"""Keys of a language model that belong to its head, and mean nothing in a larger model of `transformers`."""


@cache
def languages() -> Mapping[str, ArchitectureComponent]:
    """Returns the installed architectures of language models, by `model_type`."""
    known = architectures(Catalog.installed())
    return {name: each for name, each in known.items() if not isinstance(each, SEEING)}


@frozen
class Language:
    """The language model of a larger one."""

    model_type: str
    form: Form

    @property
    def architecture(self) -> ArchitectureComponent:
        """The architecture whose fields and rules describe it."""
        return self.form.architecture

    @property
    def flat(self) -> Flat:
        """Its keys, as the architecture's fields see them."""
        return self.form.flat

    @property
    def config(self) -> dict[str, Any]:
        """The keys of a configuration that describe it; a copy."""
        return {**self.form.config}


Named = tuple[str, ArchitectureComponent]
"""An architecture with its `model_type`."""


def language_of(model: Flat, only: Named | None = None) -> Language:
    """Returns the published form of a model's language model.

    Args:
        model: the keys of the larger model.
        only: the one form that it may have; None: any of the installed ones.

    Raises:
        Unsupported: there is none; names the keys in which the nearest one does not fit.
    """
    inner = {path.removeprefix(LANGUAGE): value for path, value in model.items() if path.startswith(LANGUAGE)}
    if not inner:
        raise Unsupported("there is no model.language")
    # As text, since a cache needs arguments that can be hashed
    return _language(tomli_w.dumps(nested(with_pattern(inner))), only)


# Fields and rules need the form of one model several times, and every architecture is tried to find it.
@cache
def _language(text: str, only: Named | None) -> Language:
    model, catalog = _parsed(text)
    try:
        fitting = fitting_forms(model, catalog, dict([only]) if only else languages())
    except JobError as error:
        raise Unsupported("; ".join(map(str, error.problems))) from error
    name = preferred(fitting)
    return Language(name, fitting[name])


# Each larger architecture needs it, most with another `only`.
@cache
def _parsed(text: str) -> tuple[ModelComponent, Catalog]:
    """The component, and the catalog by which its types have their names."""
    catalog = Catalog.installed()
    return parse_component(tomllib.loads(text), "model.language", ModelComponent, catalog), catalog


@frozen(kw_only=True)
class LanguageTable(Field):
    """`text_config`: any language model that has an architecture."""

    harmless: Collection[str] = ()
    """Further keys of the table that say nothing about what the model computes."""
    default: str = "llama"
    """The `model_type` of a table without one."""
    head_keys: Collection[str] = ()
    """Keys of `PLAIN_HEAD` that the larger model obeys all the same."""
    only: ArchitectureComponent | None = None
    """The one architecture that it may be of, called `default`; None: any that is installed."""

    @property
    def named(self) -> Named | None:
        """The one architecture that it may be of."""
        return None if self.only is None else (self.default, self.only)

    @property
    def keys(self) -> Collection[str]:
        """The table, and the key of a tied head, which may stand beside it."""
        return (TEXT, TIED)

    def architecture(self, config: Config) -> ArchitectureComponent:
        """Returns the architecture of a configuration's table."""
        name = value_of(config, TEXT, REQUIRED).get("model_type", self.default)
        known = languages() if self.only is None else {self.default: self.only}
        if name not in known:
            raise Unsupported(f"{TEXT}.model_type = {name!r}; Forge has {', '.join(sorted(known))}")
        return known[name]

    def inner(self, config: Config) -> InnerTable:
        """Returns the table, with its defaults and the keys that it shares, for the architecture that it names."""
        architecture = self.architecture(config)
        own = architecture.part_of(config)
        return InnerTable(TEXT, LANGUAGE, architecture, all_fields(architecture), own, self.harmless)

    def read(self, config: Config) -> Flat:
        """Reads the table by its architecture; raises `Unsupported` for a head that is not plain (`PLAIN_HEAD`)."""
        model = read_table(self.inner(config))
        check_head(model, self.head_keys)
        return model

    def write(self, model: Flat) -> Config:
        """Writes the table of the preferred architecture that fits; raises `Unsupported` if none does."""
        own = language_of(model, self.named)
        check_head(model, self.head_keys)
        config = own.config
        # In both places: version 4 of transformers reads it in the table, version 5 beside it.
        tied = {TIED: config[TIED]} if TIED in config else {}
        return {TEXT: {"architectures": [own.architecture.name], "model_type": own.model_type, **config}, **tied}

    def resolve(self, model: Flat) -> Flat:
        """Replaces the language model's keys by the keys that its architecture resolves them to."""
        before = [path for path in model if path.startswith(LANGUAGE)]
        try:
            own = language_of(model, self.named).flat
        except Unsupported:
            return {}  # `write` reports it
        return dict.fromkeys(before, ABSENT) | {LANGUAGE + path: value for path, value in own.items()}


def check_head(model: Flat, obeyed: Collection[str] = ()) -> None:
    """Raise `Unsupported` for what a language model does to its logits, and as a part of a larger one does not."""
    for path, plain in PLAIN_HEAD.items():
        if path not in obeyed and model.get(LANGUAGE + path, plain) != plain:
            value = model[LANGUAGE + path]
            message = f"model.{LANGUAGE}{path} = {value!r}, which classes of transformers that see images leave out"
            raise Unsupported(f"{message}; they have {plain!r} always")


def read_table(table: InnerTable) -> Flat:
    """Returns what `read_fields` does; raises `Unsupported` in place of a `JobError`, with the table's name."""
    try:
        own = read_fields(table.architecture, table.fields, table.config, table.harmless)
    except JobError as error:
        lines = (f"{table.name}.{problem}" if problem.path else str(problem) for problem in error.problems)
        raise Unsupported("; ".join(lines)) from error
    return {table.path + path: value for path, value in own.items()}


@frozen(kw_only=True)
class VisionTable(Field):
    """`vision_config`, and the processing of pixels, for one of several towers."""

    towers: Mapping[str, Tower] = field(repr=False)
    """By `model_type`; the first is used for a table without one."""
    harmless: Collection[str] = ()

    @property
    def keys(self) -> Collection[str]:
        """The table, and the processor's settings: the encoder normalises pixels here."""
        return (VISION, PIXELS)

    def inner(self, config: Config) -> InnerTable:
        """Returns the table for the tower that its `model_type` names."""
        name = value_of(config, VISION, REQUIRED).get("model_type", next(iter(self.towers)))
        if name not in self.towers:
            raise Unsupported(f"{VISION}.model_type = {name!r}; Forge has {', '.join(self.towers)}")
        tower = self.towers[name]
        return InnerTable(VISION, "", tower, with_quantisation(tower.tower()), tower.part_of(config), self.harmless)

    def read(self, config: Config) -> Flat:
        return read_table(self.inner(config))

    def write(self, model: Flat) -> Config:
        """Writes the first tower that fits; the processor's settings stand beside its table."""
        name, tower = self._chosen(model)
        config: dict[str, Any] = {"model_type": name}
        for each in tower.tower():
            config |= each.write(model)
        return {PIXELS: config.pop(PIXELS), VISION: config}  # in this order: the table is without them

    def resolve(self, model: Flat) -> Flat:
        """Resolves the encoder's keys by the first tower that fits; nothing if none does."""
        try:
            _, tower = self._chosen(model)
        except Unsupported:
            return {}  # likewise
        return _resolved(tower, model)

    def _chosen(self, model: Flat) -> tuple[str, Tower]:
        """The first tower that a model's encoder is; raises `Unsupported` with what the last one lacks."""
        for name, tower in self.towers.items():
            # By each tower alone, as the same key may have another default in the next
            own, problem = {**model, **_resolved(tower, model)}, ""
            try:
                for each in tower.tower():
                    each.write(own)
            except Unsupported as error:
                problem = f"{tower.name}: {error}"
                continue
            return name, tower
        raise Unsupported(problem)


def _resolved(tower: Tower, model: Flat) -> Flat:
    changed: dict[str, Any] = {}
    for each in tower.tower():
        changed |= each.resolve({**model, **changed})
    return changed


@frozen
class Renamed:
    """A rule some of whose names of theirs are others in a larger model."""

    rule: Rule
    rename: Callable[[str], str]

    def parts(self, name: str, shapes: Shapes) -> Sequence[Part]:
        """Returns the rule's parts under the names that they have in the larger model."""
        return [attrs.evolve(part, theirs=self.rename(part.theirs)) for part in self.rule.parts(name, shapes)]


def language_rules(model: Flat, body: str, head: str, only: Named | None = None) -> Sequence[Rule]:
    """Returns the names of the language model's tensors in a larger model.

    Args:
        model: the keys of the larger one.
        body: what names begin with, in place of `model.` or the like.
        head: likewise, of the matrix of logits, whatever it is called.
        only: the one architecture that the language model may be of; None: any that is installed.
    """
    own = language_of(model, only)

    def rename(name: str) -> str:
        first, _, rest = name.partition(".")
        return f"{head}lm_head.{rest}" if first in ("lm_head", "embed_out") else f"{body}{rest}"

    return [Renamed(rule, rename) for rule in own.architecture.rules(own.flat)]
