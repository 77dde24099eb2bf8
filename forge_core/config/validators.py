"""Demands of attrs validators, in plain words and as JSON Schema.

attrs has no public view of its validators, so they are recognised by their attributes; a validator that is none
of attrs' own is a plain function, of which nothing is known but the message it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from attrs import field, frozen

_SCHEMA_BOUND = {">": "exclusiveMinimum", ">=": "minimum", "<": "exclusiveMaximum", "<=": "maximum"}


@frozen
class Demand:
    """One thing that a validator demands."""

    text: str
    """Completes the sentence "it must …": `be > 0`."""
    check: Callable[[Any, Any, Any], Any]
    """The validator itself."""
    schema: dict[str, Any] = field(factory=dict)
    """JSON Schema keywords that say the same."""


def demands(validator: Any) -> Iterator[Demand]:
    """The demands of a field's validator, one by one."""
    if validator is None:
        return
    if hasattr(validator, "_validators"):  # and_(…), and several in a list
        for part in validator._validators:
            yield from demands(part)
    elif hasattr(validator, "compare_op"):  # lt, le, ge, gt
        bound, operator = validator.bound, validator.compare_op
        yield Demand(f"be {operator} {bound}", validator, {_SCHEMA_BOUND[operator]: bound})
    elif hasattr(validator, "options"):  # in_
        options = list(validator.options)
        yield Demand(f"be one of {_listed(options)}", validator, {"enum": options})
    elif hasattr(validator, "pattern"):  # matches_re, a full match by default
        pattern = validator.pattern.pattern
        yield Demand(f"match {pattern!r}", validator, {"pattern": f"^(?:{pattern})$"})
    elif hasattr(validator, "min_length"):
        least = validator.min_length
        yield Demand("not be empty" if least == 1 else f"be of length {least} or more", validator)
    elif hasattr(validator, "max_length"):
        yield Demand(f"be of length {validator.max_length} or less", validator)
    elif hasattr(validator, "member_validator"):  # deep_iterable
        for part in demands(validator.member_validator):
            yield Demand(f"have every entry {part.text}" if part.text else "", validator)
    elif hasattr(validator, "validator") and type(validator).__name__ == "_OptionalValidator":
        yield from demands(validator.validator)
    else:
        yield Demand("", validator)


def complaint(validator: Any, instance: Any, attribute: Any, value: Any) -> str | None:
    """Why a validator refuses a value, or None. `instance` holds the fields that are known so far."""
    for demand in demands(validator):
        try:
            demand.check(instance, attribute, value)
        except AttributeError:  # it looks at a field that is at fault itself; attrs will call it again
            continue
        except Exception as error:
            return f"must {demand.text}, got {value!r}" if demand.text else plain_message(error, attribute.name)
    return None


def plain_message(error: Exception, name: str = "") -> str:
    """The message of an exception without the field's name, which the path before it says already."""
    text = str(error.args[0]) if error.args and isinstance(error, ValueError | TypeError) else str(error)
    if isinstance(error, ValueError):
        return text.removeprefix(f"'{name}' ").removeprefix(f"{name} ") or "is not valid"
    return f"{type(error).__name__}: {text}"


def _listed(options: Iterable[Any]) -> str:
    return ", ".join(map(repr, options))
