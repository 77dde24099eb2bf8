"""From a `config.json` to the table `[model]` and back, by the fields of an architecture."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import attrs
from attrs import frozen

from forge_core.config.keys import walk_components
from forge_core.config.load import to_toml
from forge_core.contracts.components import ModelComponent
from forge_core.contracts.errors import JobError, Problem
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component
from forge_plugin_weights.keys_by_layer import (
    ABSENT,
    PerLayer,
    differs,
    merged,
    outside_kinds,
    with_pattern,
    without_pattern,
)
from forge_plugin_weights.kinds import PIXELS, ArchitectureComponent, Config, Field, Flat, Unsupported, reading

HARMLESS = frozenset(
    (
        *("architectures", "model_type", "_name_or_path", "transformers_version", "torch_dtype", "dtype"),
        *("use_cache", "initializer_range", "max_position_embeddings", "max_sequence_length"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "is_encoder_decoder", "return_dict", "problem_type"),
        *("output_attentions", "output_hidden_states", "chunk_size_feed_forward", "id2label", "label2id", PIXELS),
        # Code of the publisher's own, which transformers runs only where the user trusts it, and kernels to choose.
        *("auto_map", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
        # Settings of generation, which old files have here; transformers takes them out, too.
        *("do_sample", "max_length", "max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty"),
        *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "early_stopping", "forced_bos_token_id"),
        *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_eos_token_id", "typical_p"),
        *("length_penalty", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "output_scores"),
        *("num_return_sequences", "remove_invalid_values", "return_dict_in_generate", "suppress_tokens"),
        # Of every model, of texts or not, in files of versions before 5.
        *("decoder_start_token_id", "finetuning_task", "is_decoder", "prefix", "sep_token_id", "task_specific_params"),
        *("tf_legacy_loss", "tokenizer_class", "torchscript", "use_bfloat16"),
        # Notes of other programs.
        *("transformers.js_config", "unsloth_fixed", "unsloth_version"),
    )
)
"""Keys of every configuration that say nothing about what the model computes."""

INERT: Mapping[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
    "qkv_bias": False,
    "shared_expert_intermediate_size": 0,
}
"""Keys that add nothing to a model at one value, by which architectures without such a part read them."""
REPEATED: Mapping[str, str] = {"use_qk_norm": "attention.qk_norm"}
"""Keys that repeat what an architecture has at all times, and the keys of `[model]` that they have to agree with."""
IGNORE_HINT = "a key that changes nothing about the model's numbers may be left out: --ignore KEY"


def means_nothing(key: str, value: Any, flat: Flat) -> bool:
    """Whether a key that no field of an architecture reads changes nothing about the model that the fields describe."""
    if key in INERT:
        return bool(value == INERT[key] and type(value) is type(INERT[key]))
    return key in REPEATED and flat.get(REPEATED[key], False) is value


def read_config(architecture: ArchitectureComponent, config: Config) -> dict[str, Any]:
    """Returns the table `[model]` that a configuration describes.

    Raises:
        JobError: it has keys that Forge does not know, or values that it cannot compute; lists each of them.
    """
    return nested(read_fields(architecture, all_fields(architecture), architecture.part_of(config)))


def read_fields(
    architecture: ArchitectureComponent, fields: Sequence[Field], config: Config, harmless: Collection[str] = ()
) -> Flat:
    """Returns the keys of `[model]` that some fields of an architecture read from a configuration.

    Args:
        architecture: whose fields they are.
        fields: the table of keys.
        config: where every key must be known to one of them.
        harmless: further keys that say nothing about what the model computes.

    Raises:
        JobError: as `read_config`.
    """
    known = {key for field in fields for key in field.keys} | HARMLESS | {*architecture.harmless, *harmless}
    problems = []
    flat: dict[str, Any] = {}
    for field in fields:
        try:
            with reading(field, config):
                flat |= field.read(config)
        except Unsupported as error:
            problems.append(Problem("", str(error)))
    # A key that no field reads is an error, as it may change what the model computes, unless nobody has set it. All
    # errors are listed at once.
    unknown = [
        key
        for key, value in config.items()
        if key not in known and value is not None and not means_nothing(key, value, flat)
    ]
    hints = [""] * (len(unknown) - 1) + [f"; {IGNORE_HINT}"]  # once, whatever their number
    named = [
        Problem(key, f"{config[key]!r} is not known to Forge{hint}") for key, hint in zip(unknown, hints, strict=False)
    ]
    problems = [*named, *problems]
    if problems:
        raise JobError(problems)
    return with_pattern(flat)


def all_fields(architecture: ArchitectureComponent) -> Sequence[Field]:
    """Returns the table of keys of an architecture, with those that all of them have."""
    return with_quantisation(architecture.fields())


def with_quantisation(fields: Sequence[Field]) -> Sequence[Field]:
    """Returns a table of keys with `quantization_config`, which holds for all parts of a model."""
    from forge_plugin_weights.scaled_weights import Quantisation  # imports torch, which a check of a job does without

    return (*fields, Quantisation())


def write_config(architecture: ArchitectureComponent, model: ModelComponent, catalog: Catalog) -> dict[str, Any]:
    """Returns the keys of a configuration that describe a model.

    Raises:
        JobError: the model is not of the architecture; names the keys of `[model]` that it lacks.
    """
    return write_form(architecture, model, catalog).config


def write_form(architecture: ArchitectureComponent, model: ModelComponent, catalog: Catalog) -> Form:
    """Returns a model as an architecture describes it; see `write_config` for errors."""
    form = _form(architecture, model, flattened(to_toml(model, catalog)), catalog)
    if form.problems:
        raise JobError(form.problems)
    return form


@frozen
class Form:
    """A model as an architecture describes it."""

    architecture: ArchitectureComponent
    flat: Flat
    """The model's keys, resolved."""
    config: dict[str, Any]
    """The keys of a configuration that describe it."""
    contradicted: Sequence[Problem]
    """Keys of the model that are of another architecture."""
    lost: Sequence[Problem]
    """Keys that the configuration would lose."""
    unsaid: int
    """How many keys of the architecture's configurations the model leaves unspecified."""

    @property
    def problems(self) -> Sequence[Problem]:
        """The keys of other architectures, or else the keys that would be lost; none if the model is of this one."""
        return self.contradicted or self.lost

    def distance(self) -> tuple[int, int, int]:
        """How far the model is from the architecture, for the message about one that is of none."""
        return len(self.contradicted), len(self.lost), self.unsaid


def _form(architecture: ArchitectureComponent, model: ModelComponent, table: Flat, catalog: Catalog) -> Form:
    """Returns the form of a model, whose keys `table` has: many architectures are tried with the same ones."""
    fields = architecture.fields()
    flat = _resolved_by(fields, table)
    config: dict[str, Any] = {}
    contradicted = []
    for field in fields:
        try:
            written = field.write(flat)
        except Unsupported as error:
            contradicted.append(Problem("", str(error)))
            continue
        except TypeError:  # `PerLayer`, with which nothing can be computed
            if not any(isinstance(value, PerLayer) for value in flat.values()):
                raise
            contradicted.append(Problem("", f"{', '.join(field.keys)} cannot differ between layers"))
            continue
        by_layer = [key for key, value in written.items() if isinstance(value, PerLayer)]
        # Also within tables such as `rope_parameters`, unless a key outside of them shows the difference
        by_layer = by_layer or [key for key, value in written.items() if differs(value)]
        contradicted += [Problem("", f"{key} is one for all layers, not {written[key]}") for key in by_layer]
        config |= written
    # Two fields may need the same key, and name the same value of it.
    contradicted = [problem for n, problem in enumerate(contradicted) if problem not in contradicted[:n]]
    try:
        lost = () if contradicted else list(_lost(architecture, config, flat, model, catalog))
    except JobError as error:  # what was written cannot be read, so it is of another architecture
        lost = error.problems
    unsaid = {key for field in fields for key in field.written} - {*config}
    return Form(architecture, flat, config, contradicted, lost, len(unsaid))


def _lost(
    architecture: ArchitectureComponent, config: Config, flat: Flat, model: ModelComponent, catalog: Catalog
) -> Iterator[Problem]:
    """Yields keys of the model whose values would be others if the configuration was read again."""
    # Read again as an import would: that shows what the configuration does not have, without a list of such keys.
    table = read_config(architecture, config)
    again = parse_component(table, "config.json", ModelComponent, catalog)
    other = resolved(architecture, flattened(to_toml(again, catalog)))
    free = {*outside_kinds(_safe_keys(model)), *outside_kinds(_safe_keys(again))}
    for path in sorted({*flat, *other}):
        # A free key may be a table, such as a kernel that is a component.
        if any(path == key or path.startswith(f"{key}.") for key in free):
            continue
        if flat.get(path) != other.get(path) and not fits_any(path, architecture.training_only):
            there = f"it is {other[path]!r} there" if path in other else "there is no such key"
            yield Problem(f"model.{path}", f"{flat.get(path)!r} has no counterpart in {architecture.name}: {there}")


def _safe_keys(model: ModelComponent) -> Iterator[str]:
    """Yields paths of keys that do not change what a model computes: kernels, and how initial weights are drawn."""
    for path, component in walk_components(model):
        for field in attrs.fields(cast("Any", type(component))):
            if field.metadata.get("when_resumed") == "safe" or field.name == "init_std":
                yield f"{path}.{field.name}" if path else field.name


def resolved(architecture: ArchitectureComponent, flat: Flat) -> Flat:
    """Returns a model's keys as fields see them.

    Keys have the values that a width of 0 and the like stand for, and those that differ between layers are `PerLayer`.
    """
    return _resolved_by(architecture.fields(), flat)


def _resolved_by(fields: Sequence[Field], flat: Flat) -> Flat:
    return merged([_resolved(fields, layer) for layer in without_pattern(flat)])


def _resolved(fields: Sequence[Field], flat: Flat) -> Flat:
    known = dict(flat)
    for field in fields:
        # In order: a field sees what earlier ones resolved, such as a width that others derive from.
        known.update(field.resolve(known))
    return {path: value for path, value in known.items() if value is not ABSENT}


def flattened(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns nested tables as one, with keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        here = f"{path}{key}"
        # An empty table stays a value, or its key would disappear.
        flat |= flattened(value, f"{here}.") if isinstance(value, Mapping) and value else {here: value}
    return flat


def nested(flat: Flat) -> dict[str, Any]:
    """Returns the tables that `flattened` has made one."""
    table: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, key = path.split(".")
        inner = table
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[key] = value
    return table


def fits_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name fits one of several patterns."""
    # Not `fnmatch`, which ignores case on some systems
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def architecture_of(config: Config, catalog: Catalog) -> tuple[str, ArchitectureComponent]:
    """Returns the architecture of a configuration, with its name.

    Raises:
        JobError: none that is installed has its `model_type`; lists those there are.
    """
    name = config.get("model_type")
    if not isinstance(name, str):
        raise JobError(
            [Problem("model_type", "it is missing; say which architecture this is with --architecture NAME")]
        )
    known = architectures(catalog)
    if name not in known:
        message = f"{name!r} is none of the installed ones: {', '.join(sorted(known))}"
        raise JobError([Problem("model_type", f"{message}{_reason(config, known)}")])
    return name, known[name]


def _reason(config: Config, known: Collection[str]) -> str:
    """What else a user wants to know of a model whose architecture is not there."""
    parts = (config.get(table) for table in ("text_config", "vision_config"))
    types = (str(part.get("model_type")) for part in parts if isinstance(part, Mapping))
    if inside := [type_ for type_ in types if type_ in known]:
        return f"; a part of it comes in alone by --architecture {' or '.join(inside)}"
    return ""


def architectures(catalog: Catalog) -> dict[str, ArchitectureComponent]:
    """Returns all installed architectures by `model_type`."""
    offers = catalog.offers(ArchitectureComponent.kind)
    return {offer.type: load_architecture(offer.qualified, catalog) for offer in offers}


def load_architecture(type_: str, catalog: Catalog) -> ArchitectureComponent:
    """Returns an architecture by its name, or by the place of its class, such as `./mine.py:Mine`."""
    cls: Any = catalog.load(ArchitectureComponent.kind, type_, ArchitectureComponent)
    architecture: ArchitectureComponent = cls()
    return architecture


def place_of(named: str, architecture: ArchitectureComponent, catalog: Catalog) -> str:
    """Returns where the class of an architecture is that was named by its place; empty for an installed one."""
    # With the whole path of a file, as an export may be made elsewhere
    return catalog.type_of(type(architecture)) if ":" in named else ""


def plain_type(name: str) -> str:
    """Returns the `model_type` of an installed architecture, which may be named with its distribution."""
    return name.rpartition("/")[2]


def fitting_forms(
    model: ModelComponent, catalog: Catalog, among: Mapping[str, ArchitectureComponent] | None = None
) -> Mapping[str, Form]:
    """Returns a model as each architecture that it is of describes it, by `model_type`; most are of one.

    Args:
        model: the component.
        catalog: which architectures there are.
        among: those to choose from; all, by default.

    Raises:
        JobError: there is none; names the keys that the nearest lacks.
    """
    known = architectures(catalog) if among is None else among
    table = flattened(to_toml(model, catalog))
    forms = {name: _form(architecture, model, table, catalog) for name, architecture in known.items()}
    if fitting := {name: form for name, form in forms.items() if not form.problems}:
        return fitting
    # Of equals Llama, the one that most users know, or else the first by name: the message is always the same.
    nearest = min(forms, key=lambda name: (*forms[name].distance(), name != "llama", name))
    message = f"this model is none of {', '.join(sorted(known))}; the nearest is {nearest}, but"
    raise JobError([Problem("model", message), *forms[nearest].problems])


def preferred(fitting: Mapping[str, Form]) -> str:
    """Returns the architecture that most programs know, of those that are the same model: Llama, or the plainest."""
    if "llama" in fitting:
        return "llama"
    keys = {name: {key for field in form.architecture.fields() for key in field.keys} for name, form in fitting.items()}
    return min(fitting, key=lambda name: (fitting[name].architecture.seldom, len(keys[name]), name))
