"""The meaning of each key of a configuration to Forge."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from forge_core.contracts.errors import JobError
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, InnerTable, Unsupported, reading
from forge_plugin_weights.pixels import image_table
from forge_plugin_weights.tables import HARMLESS, all_fields, flattened, means_nothing, read_config

NOTHING, NOT_KNOWN = "no meaning for the model", "NOT KNOWN"
Rows = list[Sequence[str]]


def describe(architecture: ArchitectureComponent, config: Config) -> tuple[Rows, bool]:
    """Returns a row for each key of a configuration, and whether Forge supports all of it."""
    return _rows(architecture, all_fields(architecture), architecture.part_of(config))


def without(architecture: ArchitectureComponent, config: Config, ignored: Collection[str]) -> Config:
    """Returns a configuration without keys that mean nothing, or whose parts are left out, as an importer has stated.

    Args:
        architecture: whose configuration it is.
        config: the configuration, or a larger model's of which the architecture is a part.
        ignored: the keys; those in tables of it, with dots (`text_config.version`).

    Raises:
        JobError: there is no such key, or a field reads it, so that it may change what the model computes, and it is
            none of the architecture's removable parts.
    """
    if not ignored:
        return config
    config = architecture.part_of(config)
    rows, _ = describe(architecture, config)
    meanings = {row[0]: row[2] for row in rows}
    for key in ignored:
        if key not in meanings:
            near = get_close_matches(key, meanings, 1)
            hint = f"did you mean {near[0]}?" if near else "weights inspect lists its keys"
            raise JobError(f"--ignore {key}: config.json has no such key; {hint}")
        if meanings[key] != NOT_KNOWN and key not in architecture.removable:
            message = "only a key without a meaning to Forge can be ignored, and this one has one"
            raise JobError(f"--ignore {key}: {message} ({meanings[key]})")
    return _without(config, ignored)


def _without(config: Config, keys: Collection[str], path: str = "") -> Config:
    return {
        key: _without(value, keys, f"{path}{key}.") if isinstance(value, Mapping) else value
        for key, value in config.items()
        if f"{path}{key}" not in keys
    }


def value_at(config: Config, key: str) -> Any:
    """Returns the value of a key, which may be in a table of a configuration, with dots; None if it is not there."""
    if key in config:  # keys of GGUF have dots
        return config[key]
    for name in key.split("."):
        if not isinstance(config, Mapping) or name not in config:
            return None
        config = config[name]
    return config


def describe_images(architecture: ArchitectureComponent, config: Config) -> Sequence[str]:
    """Returns lines on how a job's images become like the published model's; none for a model without images."""
    try:
        model = flattened(read_config(architecture, config))
    except JobError:
        return ()  # `describe` reports the errors
    images = image_table(architecture.part_of(config), model)
    return images.lines() if images else ()


def _rows(
    architecture: ArchitectureComponent, fields: Iterable[Field], config: Config, harmless: Collection[str] = ()
) -> tuple[Rows, bool]:
    meanings: dict[str, str] = dict.fromkeys((*HARMLESS, *architecture.harmless, *harmless), NOTHING)
    supported = True
    flat: dict[str, Any] = {}
    tables: dict[str, InnerTable] = {}
    for field in fields:
        try:
            with reading(field, config):
                if table := field.inner(config):
                    tables[table.name] = table
                    meanings |= dict.fromkeys(field.keys, "")
                    continue  # its rows say more than all of it at once
                flat |= (read := field.read(config))
                settings = ", ".join(f"model.{path} = {value!r}" for path, value in read.items())
                settings = "; ".join(filter(None, (settings, field.remark(config))))
        except Unsupported as error:
            settings, supported = f"NOT SUPPORTED: {error}", False
        for key in field.keys:
            meanings[key] = "; ".join(filter(None, (meanings.get(key, ""), settings)))
    rows: Rows = []
    for key, value in config.items():
        if key in tables:
            own, all_known = _inner_rows(tables[key])
            rows += own
            supported = supported and all_known
            continue
        if key not in meanings and (value is None or means_nothing(key, value, flat)):  # null: as if it was missing
            meanings[key] = NOTHING
        if key not in meanings:
            supported = False
        text = repr(value)
        rows.append([key, text if len(text) < 40 else f"{text[:36]}…", meanings.get(key, NOT_KNOWN) or "supported"])
    return rows, supported


def _inner_rows(table: InnerTable) -> tuple[Rows, bool]:
    rows, supported = _rows(table.architecture, table.fields, table.config, table.harmless)
    # The part's fields name keys of its table, which are below a table of the larger model.
    return [
        [f"{table.name}.{key}", value, meaning.replace("model.", f"model.{table.path}")] for key, value, meaning in rows
    ], supported


def remarks(architecture: ArchitectureComponent, config: Config) -> Sequence[str]:
    """Returns a line for each value of a configuration that is read and has no effect here."""
    return list(_remarks(all_fields(architecture), architecture.part_of(config)))


def _remarks(fields: Iterable[Field], config: Config) -> Iterator[str]:
    for field in fields:
        if table := field.inner(config):
            yield from (f"{table.name}.{remark}" for remark in _remarks(table.fields, table.config))
        elif remark := field.remark(config):
            yield remark
