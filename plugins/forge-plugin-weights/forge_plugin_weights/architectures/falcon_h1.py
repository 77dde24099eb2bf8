"""Falcon-H1: attention and Mamba-2 side by side in each layer, with factors on what they read and return."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import attrs
from attrs import frozen

from forge_plugin_weights.architectures.bamba import NAMES
from forge_plugin_weights.architectures.dense import (
    TRANSFORMER,
    all_biases,
    attention_fields,
    named_alike,
    shape_fields,
    swiglu_fields,
    tied_head,
)
from forge_plugin_weights.architectures.granite_hybrid import MAMBA, MAMBA_RULES, StepLimit
from forge_plugin_weights.fields import Dropout, Fixed, Key, Only, setting, value_of
from forge_plugin_weights.keys_by_layer import ABSENT
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Rule, Unsupported
from forge_plugin_weights.rules import Same

TYPE, PARALLEL = "attention.type", f"{TRANSFORMER}/parallel"
FULL, STATE = "full", "mamba"
"""Names of both mixers in the job of an import."""
ATTENTION, GROUPS = "attention.", "attention.groups"


def below(name: str) -> str:
    """Returns how paths of a mixer begin."""
    return f"{ATTENTION}mixers.{name}."


@frozen(kw_only=True)
class Mixer(Field):
    """The keys of one mixer, by fields that know it as the only attention."""

    mixer: str
    fields: Sequence[Field]

    @property
    def keys(self) -> Collection[str]:
        return [key for each in self.fields for key in each.keys]

    @property
    def written(self) -> Collection[str]:
        """Those of its fields."""
        return [key for each in self.fields for key in each.written]

    def read(self, config: Config) -> Flat:
        """Reads the keys of the mixer, with paths below its table."""
        own = {path: value for each in self.fields for path, value in each.read(config).items()}
        return {below(self.mixer) + path.removeprefix(ATTENTION): value for path, value in own.items()}

    def write(self, model: Flat) -> Config:
        """Writes the keys of the mixer."""
        inner = self._inner(model)
        config: dict[str, Any] = {}
        for each in self.fields:
            config |= each.write(inner)
        return config

    def resolve(self, model: Flat) -> Flat:
        """Returns what 0 stands for in the mixer."""
        known = dict(inner := self._inner(model))
        for each in self.fields:
            known |= each.resolve(known)
        changed = {path: value for path, value in known.items() if path not in inner or inner[path] != value}
        return {below(self.mixer) + path.removeprefix(ATTENTION): value for path, value in changed.items()}

    def _inner(self, model: Flat) -> dict[str, Any]:
        """The keys of a model of which this mixer is the only attention."""
        prefix = below(self.mixer)
        rest = {path: value for path, value in model.items() if not path.startswith(ATTENTION)}
        own = {path: value for path, value in model.items() if path.startswith(prefix)}
        return rest | {ATTENTION + path.removeprefix(prefix): value for path, value in own.items()}


@frozen
class Factor(Field):
    """A factor of one mixer, which is 1 without an entry."""

    theirs: str
    table: str
    """`scales` or `input_scales`."""
    mixer: str

    @property
    def keys(self) -> Collection[str]:
        return (self.theirs,)

    def read(self, config: Config) -> Flat:
        """Reads the factor; raises `Unsupported` for one that is not positive."""
        return {f"{ATTENTION}{self.table}.{self.mixer}": positive(self.theirs, value_of(config, self.theirs, 1.0))}

    def write(self, model: Flat) -> Config:
        """Writes the factor."""
        return {self.theirs: setting(model, f"{ATTENTION}{self.table}.{self.mixer}")}

    def resolve(self, model: Flat) -> Flat:
        """Returns 1 where there is no entry."""
        path = f"{ATTENTION}{self.table}.{self.mixer}"
        return {path: 1.0} if model.get(TYPE) == PARALLEL and path not in model else {}


@frozen
class NoTable(Field):
    """Tables of factors without entries, which other fields resolve to factors of 1."""

    def resolve(self, model: Flat) -> Flat:
        """Removes what stands for an empty table."""
        paths = (f"{ATTENTION}{table}" for table in ("scales", "input_scales"))
        return {path: ABSENT for path in paths if path in model}


@frozen
class Multipliers(Field):
    """Several factors of one key, each a key of ours or an entry of one."""

    theirs: str
    ours: tuple[str, ...]
    """Paths, one for each factor; one for all: a key that has them all."""
    count: int

    @property
    def keys(self) -> Collection[str]:
        return (self.theirs,)

    def read(self, config: Config) -> Flat:
        """Reads all of them, each 1 by default."""
        factors = [positive(self.theirs, each) for each in value_of(config, self.theirs, [1.0] * self.count)]
        if len(factors) != self.count:
            raise Unsupported(f"{self.theirs} has {len(factors)} factors, where there are {self.count}")
        return {self.ours[0]: factors} if len(self.ours) == 1 else dict(zip(self.ours, factors, strict=True))

    def write(self, model: Flat) -> Config:
        """Writes the list."""
        values = [setting(model, path) for path in self.ours]
        return {self.theirs: list(values[0]) if len(self.ours) == 1 else values}


@frozen
class HeadWidth(Field):
    """The width of a head of Mamba-2: a key, or all heads' width by another one, or by a multiple of the model's."""

    @property
    def keys(self) -> Collection[str]:
        return ("mamba_d_head", "mamba_d_ssm", "mamba_expand")

    @property
    def written(self) -> Collection[str]:
        """The width of a head and of all, beside which the multiple means nothing."""
        return ("mamba_d_head", "mamba_d_ssm")

    def read(self, config: Config) -> Flat:
        """Reads the width of a head; raises `Unsupported` where it is not the width of all heads by their number."""
        whole = config.get("mamba_d_ssm", 1024)  # null: by the multiple
        if whole is None:
            whole = value_of(config, "mamba_expand", 2) * config["hidden_size"]
        heads, given = value_of(config, "mamba_n_heads", 128), value_of(config, "mamba_d_head", "auto")
        if whole % heads or given not in ("auto", whole // heads):
            raise Unsupported(f"mamba_d_head = {given!r}, where {heads} heads have {whole} together")
        return {"attention.head_dim": whole // heads}

    def write(self, model: Flat) -> Config:
        """Writes both, and the multiple of published files."""
        heads, width = setting(model, "attention.heads"), setting(model, "attention.head_dim")
        return {"mamba_d_head": width, "mamba_d_ssm": heads * width, "mamba_expand": 2}

    def resolve(self, model: Flat) -> Flat:
        """Returns the width that 0 stands for."""
        width = 2 * model["dim"] // model["attention.heads"] if "attention.heads" in model else 0
        return {} if model.get("attention.head_dim", 1) else {"attention.head_dim": width}


@frozen
class GatedNorm(Field):
    """The norm of what heads of Mamba-2 read: none, or before or after the gate."""

    @property
    def keys(self) -> Collection[str]:
        return ("mamba_rms_norm", "mamba_norm_before_gate")

    def read(self, config: Config) -> Flat:
        """Reads where it is; of a norm, groups are those of b and c."""
        if not value_of(config, "mamba_rms_norm", False):
            return {"attention.norm": "none", "attention.norm_groups": 0}
        before = config.get("mamba_norm_before_gate", True)  # null is false
        groups = value_of(config, "mamba_n_groups", 1)
        return {"attention.norm": "before" if before else "after", "attention.norm_groups": groups}

    def write(self, model: Flat) -> Config:
        """Writes both; raises `Unsupported` for other groups than those of b and c."""
        where, groups = setting(model, "attention.norm"), setting(model, GROUPS)
        if where != "none" and setting(model, "attention.norm_groups") != groups:
            raise Unsupported(f"attention.norm_groups = {model['attention.norm_groups']!r}, where it has {groups!r}")
        return {"mamba_rms_norm": where != "none", "mamba_norm_before_gate": where == "before"}

    def resolve(self, model: Flat) -> Flat:
        """Returns the groups that 0 stands for, none without a norm, whose key of precision means nothing then."""
        if model.get("attention.norm") == "none":
            return {"attention.norm_groups": 0, "attention.norm_eps": 1e-5}
        return {} if model.get("attention.norm_groups", 1) else {"attention.norm_groups": model[GROUPS]}


@frozen
class Biases(Field):
    """Biases of the projections of Mamba-2, for which those before and after the state have a key each."""

    @property
    def keys(self) -> Collection[str]:
        return ("mamba_proj_bias", "projectors_bias")

    def read(self, config: Config) -> Flat:
        """Reads both, which have to agree."""
        first, last = (value_of(config, key, False) for key in self.keys)
        if first != last:
            raise Unsupported(f"mamba_proj_bias = {first!r} and projectors_bias = {last!r}; mamba2 has both or none")
        return {"attention.bias": first}

    def write(self, model: Flat) -> Config:
        """Writes both."""
        return dict.fromkeys(self.keys, setting(model, "attention.bias"))


def positive(key: str, factor: float) -> float:
    """Returns a factor; raises `Unsupported` for one that is not positive."""
    if factor <= 0:
        raise Unsupported(f"{key} = {factor!r}; factors above 0 work")
    return float(factor)


def full_fields() -> Sequence[Field]:
    """Returns the keys of attention. A factor on keys is one on scores."""
    by_width = lambda config: (  # noqa: E731
        value_of(config, "head_dim", config["hidden_size"] // config["num_attention_heads"]) ** -0.5
    )
    return (
        *(each for each in attention_fields(kv_heads=8) if not isinstance(each, Dropout)),
        all_biases(),
        Fixed({"attention.qk_norm": False}),
        KeyFactor(by_width),
    )


@frozen
class KeyFactor(Field):
    """`key_multiplier`, a factor on keys: as one on scores it is a multiple of 1 / sqrt(width of a head)."""

    usual: Any
    """Returns that of a configuration."""

    @property
    def keys(self) -> Collection[str]:
        return ("key_multiplier",)

    def read(self, config: Config) -> Flat:
        """Reads the factor on scores."""
        factor = positive("key_multiplier", value_of(config, "key_multiplier", 1.0))
        return {"attention.scale": factor * self.usual(config)}

    def write(self, model: Flat) -> Config:
        """Writes the factor on keys: the number that was read, but for its last digit."""
        scale, usual = setting(model, "attention.scale"), setting(model, "attention.head_dim") ** -0.5
        factor = scale / usual
        short = float(f"{factor:.12g}")
        return {"key_multiplier": short if short * usual == scale else factor}

    def resolve(self, model: Flat) -> Flat:
        """Returns the factor that 0 stands for."""
        if model.get("attention.scale", 1) or "attention.head_dim" not in model:
            return {}
        return {"attention.scale": model["attention.head_dim"] ** -0.5}


def state_fields() -> Sequence[Field]:
    """Returns the keys of Mamba-2."""
    return (
        Fixed({TYPE: MAMBA}),
        Key("mamba_n_heads", "attention.heads", 128),
        HeadWidth(),
        Key("mamba_n_groups", GROUPS, 1),
        GatedNorm(),
        Key("mamba_d_state", "attention.state", 256),
        Key("mamba_d_conv", "attention.conv", 4),
        Key("mamba_conv_bias", "attention.conv_bias", True, null=False),
        Biases(),
        Key("rms_norm_eps", "attention.norm_eps", 1e-5),
        StepLimit(),
        Multipliers("ssm_multipliers", ("attention.multipliers",), 5),
    )


@frozen(kw_only=True)
class FalconH1(ArchitectureComponent):
    """Falcon-H1 (TII 2025, arXiv 2507.22448): 0.5B to 34B."""

    name = "FalconH1ForCausalLM"
    # Notes of the publisher's own code, whose layers are all alike and have a feed-forward part
    harmless = ("mamba_chunk_size", "num_logits_to_keep", "layers_block_type", "layer_types")
    training_only = (f"{below(STATE)}chunk",)

    def fields(self) -> Sequence[Field]:
        """Returns the keys of both mixers, of the feed-forward part, and of factors."""
        eps = "rms_norm_eps"
        return (
            *shape_fields(),
            Fixed({TYPE: PARALLEL}),
            NoTable(),
            Mixer(mixer=FULL, fields=full_fields()),
            Mixer(mixer=STATE, fields=state_fields()),
            Factor("attention_in_multiplier", "input_scales", FULL),
            Factor("attention_out_multiplier", "scales", FULL),
            Factor("ssm_in_multiplier", "input_scales", STATE),
            Factor("ssm_out_multiplier", "scales", STATE),
            Multipliers("mlp_multipliers", ("ffn.gate_scale", "ffn.scale"), 2),
            Key("embedding_multiplier", "embedding_scale", 1.0),
            Key("lm_head_multiplier", "logit_scale", 1.0),
            Dropout("attention_dropout"),
            Only("mamba_use_mlp", True, "layers have a feed-forward part", write_it=False),
            Only("attn_layer_indices", None, "all layers have attention", write_it=False),
            Key("mlp_bias", "ffn.bias", False),
            *swiglu_fields(),
            Key(eps, "norm.eps", 1e-5),
        )

    def rules(self, model: Flat) -> Sequence[Rule]:
        """Returns the rules; names around both mixers are those of Bamba."""
        around = (Same(ours, theirs) for ours, theirs in NAMES.items())
        return (*around, *FULL_RULES, *STATE_RULES, *tied_head(model))


def _inside(rules: Sequence[Rule], mixer: str) -> Iterator[Rule]:
    """Yields rules of an attention for a mixer."""

    def of(template: str) -> str:
        return template.replace("{layer}.attention.", f"{{layer}}.{below(mixer)}")

    for rule in rules:
        known: Any = rule
        ours = of(known.ours) if isinstance(known.ours, str) else [*map(of, known.ours)]
        yield attrs.evolve(known, ours=ours)


FULL_RULES: Sequence[Rule] = tuple(_inside(named_alike(*(f"attention.{name}" for name in "qkvo")), FULL))
STATE_RULES: Sequence[Rule] = tuple(_inside(MAMBA_RULES, STATE))
"""Of Mamba-2, by the names of Granite 4."""
