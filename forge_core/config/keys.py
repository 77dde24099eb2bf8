"""The keys of tables: fields of classes with their types, defaults, validators and documentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import NOTHING, Attribute, Factory, fields, frozen, has, resolve_types

from forge_core.config.field_types import Mismatch
from forge_core.contracts.components import Component
from forge_core.contracts.errors import PluginError


def key_fields(cls: type) -> dict[str, Attribute]:
    """The fields of an attrs class that are keys of a table, by key, with the fields of its bases last."""
    own_first = sorted(fields(cls), key=lambda f: f.inherited)
    return {f.alias or f.name: f for f in own_first if f.init}  # without `init`, it is the state of a hook or plugin


def resolved_fields(cls: type) -> dict[str, Attribute]:
    """Fields of an attrs class by key, with their types, of which annotations have only the names.

    Raises:
        PluginError: a type does not exist at run time.
    """
    try:
        return key_fields(resolve_types(cls))
    except NameError as error:
        raise PluginError(
            f"the fields of {cls.__qualname__} cannot be read: {error}; "
            "import the types of fields outside TYPE_CHECKING"
        ) from error


def default_of(f: Attribute) -> Any:
    """Default of a field, or `NOTHING` if there is none or it depends on the other fields."""
    default: Any = f.default
    if isinstance(default, Factory):  # type: ignore[arg-type]  # a class, which the stubs declare as functions
        return NOTHING if default.takes_self else default.factory()
    return default


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """The keys below a value of the job, with their values."""
    if has(type(value)):
        yield from ((key, getattr(value, f.name)) for key, f in key_fields(type(value)).items())
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), item) for index, item in enumerate(value))


def walk_components(value: Any, path: str = "") -> Iterator[tuple[str, Component]]:
    """Every component in a job or a part of one, with its path (`model.ffn.router`); those inside another after it."""
    if isinstance(value, Component):
        yield path, value
    for key, child in children(value):
        yield from walk_components(child, f"{path}.{key}" if path else key)


@frozen
class Demand:
    """One condition of a validator."""

    text: str
    """Completes the sentence "it must …": `be > 0`."""
    check: Any
    """The validator, which is called with the instance, the field and the value."""


def demands(validator: Any) -> Iterator[Demand]:
    """The conditions of a field's validator, one by one."""
    # attrs has no public view of its validators, so attributes distinguish them. Any other validator is a plain
    # function, and nothing is known of it but the message that it raises.
    match validator:
        case None:
            return
        case object(_validators=parts):  # and_(…), and several in a list
            for part in parts:
                yield from demands(part)
        case object(compare_op=operator, bound=bound):  # lt, le, ge, gt
            yield Demand(f"be {operator} {bound}", validator)
        case object(options=options):  # in_
            yield Demand(f"be one of {', '.join(map(repr, options))}", validator)
        case object(pattern=pattern):  # matches_re, a full match by default
            yield Demand(f"match {pattern.pattern!r}", validator)
        case object(min_length=least):
            yield Demand("not be empty" if least == 1 else f"be of length {least} or more", validator)
        case object(max_length=most):
            yield Demand(f"be of length {most} or less", validator)
        case object(member_validator=member):  # deep_iterable
            for part in demands(member):
                yield Demand(f"have every entry {part.text}" if part.text else "", validator)
        case object(validator=inner) if type(validator).__name__ == "_OptionalValidator":
            yield from demands(inner)
        case _:
            yield Demand("", validator)


def validate(f: Attribute, value: Any, instance: Any) -> None:
    """Raise a `Mismatch` if a field's validator refuses a value; `instance` has the fields that are known already."""
    # The validator of a field with a converter expects the converted value: attrs calls it when it makes the object.
    for demand in demands(None if f.converter else f.validator):
        try:
            demand.check(instance, f, value)
        except AttributeError:  # it looks at a field that is at fault itself; attrs will call it again
            continue
        except Exception as error:
            message = f"must {demand.text}, got {value!r}" if demand.text else plain_message(error, f.name)
            raise Mismatch(message) from error


def plain_message(error: Exception, name: str = "") -> str:
    """The message of an exception without the field's name, which is already part of the path before it."""
    text = str(error.args[0]) if error.args and isinstance(error, ValueError | TypeError) else str(error)
    if isinstance(error, ValueError):
        return text.removeprefix(f"'{name}' ").removeprefix(f"{name} ") or "is not valid"
    return f"{type(error).__name__}: {text}"
