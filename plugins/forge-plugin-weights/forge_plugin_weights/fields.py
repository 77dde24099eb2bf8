"""Kinds of entries in an architecture's table of keys; see `forge_plugin_weights.kinds.Field`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from forge_plugin_weights.keys_by_layer import PerLayer
from forge_plugin_weights.kinds import Config, Field, Flat, Unsupported

REQUIRED = object()
"""The default of a key that must be there."""


def _default(default: Any, config: Config) -> Any:
    return default(config) if callable(default) else default


def value_of(config: Config, key: str, default: Any) -> Any:
    """Returns the value of a key, or its default, which may be a function of the configuration.

    Raises:
        Unsupported: the key is missing, and has no default.
    """
    # Null counts as missing: saved configurations have it for values that nobody set.
    if config.get(key) is not None:
        return config[key]
    if default is REQUIRED:
        raise Unsupported(f"{key} is missing")
    return _default(default, config)


def setting(model: Flat, path: str) -> Any:
    """Returns the value of a key of the model; raises `Unsupported` if there is none."""
    if path not in model:
        raise Unsupported(f"there is no model.{path}")
    return model[path]


@frozen
class Key(Field):
    """A key that both sides have."""

    theirs: str
    ours: str | tuple[str, ...]
    """Several paths have the same value."""
    default: Any = REQUIRED
    """The value where the configuration has none, or null; a function of it if it follows from others."""
    derived: Callable[[Flat], Any] | None = None
    """Returns the value that 0 or None stands for on our side."""
    other_names: Sequence[str] = ()
    """Names of the key in other versions of `transformers`."""
    null: Any = None
    """The value of null, where that is another than `default`; a function, likewise. A flag that is true where it is
    missing is false where it is null, as its class reads it."""

    @property
    def keys(self) -> Collection[str]:
        """With the names of other versions, so that a configuration with one of them has no unknown key."""
        return (self.theirs, *self.other_names)

    @property
    def paths(self) -> Sequence[str]:
        """All keys of `[model]` that have the value; one at least."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def read(self, config: Config) -> Flat:
        """Reads the first of `other_names` with a value, or else `theirs`; every path gets the same value."""
        given = [name for name in (*self.other_names, self.theirs) if name in config]
        name = next((name for name in given if config[name] is not None), self.theirs)
        null = False if self.default is True and self.null is None else self.null
        off = null is not None and given and config.get(name) is None
        return dict.fromkeys(self.paths, _default(null, config) if off else value_of(config, name, self.default))

    def write(self, model: Flat) -> Config:
        """Writes under `theirs` only; raises `Unsupported` if the paths have different values."""
        values = {path: model[path] for path in self.paths if path in model}
        if len(set(values.values())) > 1:
            settings = ", ".join(f"{path} = {value!r}" for path, value in values.items())
            raise Unsupported(f"{settings} must be equal: {self.theirs} stands for all of them")
        # A key without a value is left out and not null, so that `Form.unsaid` counts it.
        return dict.fromkeys([self.theirs] if values else [], next(iter(values.values()), None))

    def resolve(self, model: Flat) -> Flat:
        """Returns the derived value for each path whose value is 0, None or false."""
        if self.derived is None:
            return {}
        return {path: self.derived(model) for path in self.paths if path in model and not model[path]}


@frozen
class OrNone(Field):
    """A key whose null is our 0, such as a bound or a window that is absent."""

    theirs: str
    ours: str
    default: Any = None
    """The value where the configuration has no such key."""

    @property
    def keys(self) -> Collection[str]:
        return (self.theirs,)

    def read(self, config: Config) -> Flat:
        """Reads a null as 0, and a missing key as `default`."""
        return {self.ours: config.get(self.theirs, self.default) or 0}

    def write(self, model: Flat) -> Config:
        """Writes 0 as null, since `transformers` takes 0 for a bound, a width or a rank of 0."""
        return {self.theirs: setting(model, self.ours) or None}


@frozen
class Converted(Field):
    """A number that both sides have, each in its own terms."""

    theirs: str
    ours: str
    to_ours: Callable[[Any], Any]
    to_theirs: Callable[[Any], Any]
    default: Any = REQUIRED
    derived: Callable[[Flat], Any] | None = None
    """Returns the value that 0 stands for on our side."""

    @property
    def keys(self) -> Collection[str]:
        return (self.theirs,)

    def read(self, config: Config) -> Flat:
        """Converts the value or the default, which is in their terms too."""
        return {self.ours: self.to_ours(value_of(config, self.theirs, self.default))}

    def write(self, model: Flat) -> Config:
        """Inverts the conversion, and writes a whole or short number where that converts back to ours exactly."""
        ours = setting(model, self.ours)
        if isinstance(ours, PerLayer):
            # Not converted: `tables` refuses a key that differs between layers, and shows its values as a job has them.
            return {self.theirs: ours}
        exact = self.to_theirs(ours)
        # Without the error of rounding, where that is the number which was meant: 256 for 1 / 0.0625**2.
        candidates = round(exact), float(f"{exact:.12g}")
        return {self.theirs: next((value for value in candidates if value and self.to_ours(value) == ours), exact)}

    def resolve(self, model: Flat) -> Flat:
        """Returns the derived value where ours is 0; a model without the key gets none."""
        return {self.ours: self.derived(model)} if self.derived is not None and not model.get(self.ours, 1) else {}


@frozen
class Follows(Field):
    """A key of ours that no key of theirs specifies: it follows from others."""

    ours: str
    of_theirs: Callable[[Config], Any]
    of_ours: Callable[[Flat], Any]

    def read(self, config: Config) -> Flat:
        """Computes the value from other keys of the configuration."""
        return {self.ours: self.of_theirs(config)}

    def write(self, model: Flat) -> Config:
        """Writes nothing; raises `Unsupported` for any other value, which a configuration cannot express."""
        value = setting(model, self.ours)  # first: a model of another kind has none of these keys
        try:
            needed = self.of_ours(model)
        except TypeError as error:  # `PerLayer`, with which nothing can be computed
            raise Unsupported(f"{self.ours} follows from keys that differ between layers") from error
        if value != needed:
            raise Unsupported(f"{self.ours} = {value!r}, where it has {needed!r} always")
        return {}


@frozen
class Synonym(Field):
    """A value of one of our keys that means the same as another."""

    path: str
    value: Any
    means: Any

    def resolve(self, model: Flat) -> Flat:
        """Replaces `value` by `means`, so that models that compute the same have equal keys."""
        return {self.path: self.means} if model.get(self.path) == self.value else {}


@frozen
class Choice(Field):
    """A key of theirs whose values stand for settings of ours."""

    theirs: str
    options: Mapping[Any, Flat]
    default: Any = REQUIRED
    why: str = ""
    """The option of Forge that other values would need."""

    @property
    def keys(self) -> Collection[str]:
        return (self.theirs,)

    def read(self, config: Config) -> Flat:
        """Returns the settings of the value; an unknown value is an error that lists all options."""
        value = value_of(config, self.theirs, self.default)
        if value not in self.options:
            known = ", ".join(map(repr, self.options))
            raise Unsupported(f"{self.theirs} = {value!r}; Forge has {known}{f': {self.why}' if self.why else ''}")
        return self.options[value]

    def write(self, model: Flat) -> Config:
        """Writes the first option whose settings the model has: the preferred spelling comes first in `options`."""
        for value, settings in self.options.items():
            if all(model.get(path) == setting for path, setting in settings.items()):
                return {self.theirs: value}
        paths = sorted({path for settings in self.options.values() for path in settings})
        ours = ", ".join(f"{path} = {model.get(path)!r}" for path in paths)
        raise Unsupported(f"{ours} has no counterpart in {self.theirs} ({', '.join(map(repr, self.options))})")


@frozen
class Derived(Field):
    """A key of ours that no key of theirs specifies: 0 stands for the value derived from others, which it must have."""

    path: str
    value: Callable[[Flat], Any]

    def resolve(self, model: Flat) -> Flat:
        """Returns the derived value where ours is 0 or None; a model without the key gets none."""
        return {self.path: self.value(model)} if self.path in model and not model[self.path] else {}


@frozen
class Dropout(Field):
    """A rate of dropout, which concerns training alone. Forge has none: any is read, and 0 is written."""

    theirs: str

    @property
    def keys(self) -> Collection[str]:
        return (self.theirs,)

    def remark(self, config: Config) -> str:
        """Reports a rate above 0, which a model that is trained further in Forge no longer has."""
        rate = config.get(self.theirs)
        return f"{self.theirs} = {rate!r}: Forge trains without dropout, and an export has 0" if rate else ""

    def write(self, model: Flat) -> Config:
        """Writes 0: without the key, `transformers` takes its default, which is 0.1 for GPT-2."""
        return {self.theirs: 0.0}


@frozen
class Irrelevant(Field):
    """A key of ours that means nothing while others have certain values; it counts as having its default then."""

    path: str
    default: Any
    when: Flat

    def resolve(self, model: Flat) -> Flat:
        """Returns the default under the condition, so that models that differ in an unused key are equal."""
        meaningless = self.path in model and all(model.get(path) == value for path, value in self.when.items())
        return {self.path: self.default} if meaningless else {}


@frozen
class Fixed(Field):
    """Settings of ours that the architecture always has, and that no key specifies."""

    settings: Flat

    def read(self, config: Config) -> Flat:
        return self.settings

    def write(self, model: Flat) -> Config:
        """Writes nothing; raises `Unsupported` for another setting, which the configuration would lose."""
        for path, setting in self.settings.items():
            if model.get(path) != setting:
                raise Unsupported(f"{path} = {model.get(path)!r}, where it has {setting!r} always")
        return {}


@frozen
class Only(Field):
    """A key that Forge supports at one value (the default, where it is missing), which is written."""

    theirs: str
    value: Any
    why: str
    """The option that is missing for others."""
    also: Sequence[Any] = ()
    """Values of the same meaning."""
    default: Any = None
    """The value where the key is missing; None: `value`."""
    write_it: bool = True

    @property
    def keys(self) -> Collection[str]:
        return (self.theirs,)

    @property
    def written(self) -> Collection[str]:
        """Empty if no export has the key, so that `Form.unsaid` does not count it as missing."""
        return self.keys if self.write_it else ()

    def read(self, config: Config) -> Flat:
        """Returns no key of `[model]`: raises `Unsupported` unless the value is `value` or one of `also`.

        Null is as a missing key, but where the value is true: there it would switch something off.
        """
        missing = self.value if self.default is None else self.default
        value = config.get(self.theirs, missing)
        if value is None and self.value is not True:
            value = missing
        if value != self.value and value not in self.also:
            raise Unsupported(f"{self.theirs} = {value!r}; {self.why}")
        return {}

    def write(self, model: Flat) -> Config:
        return dict.fromkeys(self.written, self.value)


@frozen
class ExportedAs(Field):
    """An architecture that is read only: its models are exported as another."""

    model_type: str
    why: str

    def write(self, model: Flat) -> Config:
        """Raises `Unsupported` always, so that no model is exported under this `model_type`."""
        raise Unsupported(f"{self.why}; export it as {self.model_type}")


@frozen(kw_only=True)
class RopeType:
    """A form of the position encoding. Both sides have its keys by the same names."""

    component: str
    """The type of `[model.attention.rope]`."""
    keys: Sequence[str] = ()
    defaults: Mapping[str, Any] = {}
    """Values of keys that the configuration may lack. They are written."""
    unsaid: Mapping[str, Any] = {}
    """Values that a configuration lacks the key for. They are not written."""


ROPES: Mapping[str, RopeType] = {
    "default": RopeType(component="forge-plugin-transformer/plain"),
    "linear": RopeType(component="forge-plugin-transformer/linear", keys=("factor",)),
    "dynamic": RopeType(
        component="forge-plugin-transformer/dynamic", keys=("factor", "original_max_position_embeddings")
    ),
    "llama3": RopeType(
        component="forge-plugin-transformer/llama3",
        keys=("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
    "longrope": RopeType(
        component="forge-plugin-transformer/longrope",
        keys=("short_factor", "long_factor", "factor", "original_max_position_embeddings", "attention_factor"),
        unsaid={"attention_factor": 0.0},  # 0: from the factor, as in transformers without the key
    ),
    "yarn": RopeType(
        component="forge-plugin-transformer/yarn",
        keys=(
            *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
            *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
        ),
        defaults={"beta_fast": 32.0, "beta_slow": 1.0},  # of `_compute_yarn_parameters`
        unsaid={"attention_factor": 0.0, "mscale": 0.0, "mscale_all_dim": 0.0, "truncate": True},
    ),
}
"""By `rope_type`."""
SHARE = "partial_rotary_factor"
ORIGINAL, LONGEST = "original_max_position_embeddings", "max_position_embeddings"


@frozen
class Rope(Field):
    """The position encoding: `rope_theta` and `rope_scaling` (transformers 4), or `rope_parameters` (5).

    Both are read, and must agree where both are there. Both are written, since programs know one of them.
    """

    path: str = "attention.rope"
    """Path of the component's table."""
    theta: float = 10000.0
    """The base where the configuration has none."""
    theta_key: str = "rope_theta"
    """Its name beside `rope_scaling`."""
    share: float | None = None
    """`partial_rotary_factor` where the configuration has none. None: the architecture rotates whole heads."""
    share_key: str = "partial_rotary_factor"
    """Its name beside `rope_scaling`."""
    types: Mapping[str, RopeType] = field(default=ROPES, repr=False)
    missing: Mapping[str, Any] = field(factory=dict, repr=False)
    """`rope_parameters` where a configuration has no table. Empty: a plain encoding."""

    @property
    def keys(self) -> Collection[str]:
        """The keys of both forms; the share's only where the architecture may rotate a part of a head."""
        return self.theta_key, "rope_scaling", "rope_parameters", *([] if self.share is None else [self.share_key])

    def read(self, config: Config) -> Flat:
        """Reads both forms.

        Raises:
            Unsupported: they disagree, the type is not known, or it lacks a key or has one that it does not take.
        """
        config = self.completed(config)
        forms = [form for form in (self._first_form(config), self._second_form(config)) if form is not None]
        if len(forms) == 2 and "rope_scaling" not in config:  # the base stands in both places; the form, in one
            forms[0] = {**forms[1], "rope_theta": forms[0]["rope_theta"]}
        if len(forms) == 2 and forms[0] != forms[1]:
            raise Unsupported(f"rope_parameters = {forms[1]} and rope_theta, rope_scaling = {forms[0]} disagree")
        form: dict[str, Any] = dict(forms[-1]) if forms else {"rope_type": "default", **self._beside(config)}
        type_ = form.pop("rope_type")
        if type_ not in self.types:
            raise Unsupported(f"rope_type = {type_!r}; Forge has {', '.join(self.types)}")
        known = self.types[type_]
        theta = form.pop("rope_theta")
        # Taken only where the architecture has a share: for others it is an unknown key.
        share = {} if self.share is None else {f"{self.path}.{SHARE}": form.pop(SHARE)}
        if type_ == "dynamic":  # as in transformers, regardless of the table
            form[ORIGINAL] = config.get(LONGEST)
        # As `standardize_rope_params` of transformers does
        elif ORIGINAL in known.keys:
            form.setdefault(ORIGINAL, config.get(LONGEST))
        if unknown := [name for name in form if name not in known.keys]:
            raise Unsupported(f"rope_type {type_!r} with {', '.join(unknown)}, which Forge does not know")
        # The configuration last, as it overrides both kinds of defaults
        values = {**known.defaults, **known.unsaid, **form}
        if missing := [name for name in known.keys if values.get(name) is None]:
            raise Unsupported(f"rope_type {type_!r} without {', '.join(missing)}")
        own = {f"{self.path}.{name}": values[name] for name in known.keys}
        return {f"{self.path}.type": known.component, f"{self.path}.theta": theta, **share, **own}

    def completed(self, config: Config) -> Config:
        """Returns a configuration with the table `missing`, where it has none.

        Raises:
            Unsupported: there is a base and no table, to which versions 4 and 5 of `transformers` give another meaning.
        """
        # An empty table is one of version 5, without a form
        if not self.missing or config.get("rope_scaling") or config.get("rope_parameters") is not None:
            return config
        if (base := config.get(self.theta_key)) is not None:
            message = (
                f"{self.theta_key} = {base} without rope_parameters has a table by version 5 of transformers alone"
            )
            raise Unsupported(f"{message}; add rope_parameters, with rope_type")
        return {**config, "rope_parameters": self.missing}

    def _beside(self, config: Config) -> dict[str, Any]:
        """Returns the keys that stand outside of `rope_scaling` and `rope_parameters`."""
        share = {} if self.share is None else {SHARE: value_of(config, self.share_key, self.share)}
        return {"rope_theta": value_of(config, self.theta_key, self.theta), **share}

    def _first_form(self, config: Config) -> dict[str, Any] | None:
        scaling = config.get("rope_scaling") or {}
        if config.get(self.theta_key) is None and not scaling:
            return None
        form = {name: value for name, value in scaling.items() if name != "type" and value is not None}
        form.setdefault("rope_type", scaling.get("type", "default"))  # `type` in older files
        # The table has precedence over keys beside it.
        return {**self._beside(config), **form}

    def _second_form(self, config: Config) -> dict[str, Any] | None:
        if not config.get("rope_parameters"):
            return None
        form = {name: value for name, value in config["rope_parameters"].items() if value is not None}
        form.setdefault("rope_type", form.pop("type", "default"))
        # The base may stand beside this table, too.
        return {**self._beside(config), **form}

    def write(self, model: Flat) -> Config:
        """Writes both forms with the same values; keys at the values of `RopeType.unsaid` are left out."""
        component, theta = model.get(f"{self.path}.type"), model.get(f"{self.path}.theta")
        for type_, known in self.types.items():
            if known.component != component:
                continue
            values = {name: model[f"{self.path}.{name}"] for name in known.keys}
            values = {name: value for name, value in values.items() if known.unsaid.get(name) != value}
            longest = {LONGEST: values.pop(ORIGINAL)} if type_ == "dynamic" else {}  # where `read` takes it from
            # Null in version 4 for a plain encoding, where version 5 has a table always
            scaling = {"rope_type": type_, **values} if type_ != "default" else None
            config, parameters = {self.theta_key: theta, **longest}, {"rope_type": type_, "rope_theta": theta, **values}
            if self.share is not None:
                config[self.share_key] = parameters[SHARE] = model[f"{self.path}.{SHARE}"]
            return {**config, "rope_scaling": scaling, "rope_parameters": parameters}
        raise Unsupported(f"{self.path}.type = {component!r} has no counterpart in rope_type ({', '.join(self.types)})")
