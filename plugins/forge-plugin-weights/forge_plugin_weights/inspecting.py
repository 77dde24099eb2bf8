"""The meaning of each key of a configuration to Forge."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from forge_core.contracts.errors import JobError
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, InnerTable, Unsupported, reading
from forge_plugin_weights.pixels import image_table
from forge_plugin_weights.tables import HARMLESS, all_fields, flattened, read_config

NOTHING = "no meaning for the model"
Rows = list[Sequence[str]]


def describe(architecture: ArchitectureComponent, config: Config) -> tuple[Rows, bool]:
    """Returns a row for each key of a configuration, and whether Forge supports all of it."""
    return _rows(architecture, all_fields(architecture), architecture.part_of(config))


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
    tables: dict[str, InnerTable] = {}
    for field in fields:
        try:
            with reading(field, config):
                if table := field.inner(config):
                    tables[table.name] = table
                    meanings |= dict.fromkeys(field.keys, "")
                    continue  # its rows say more than all of it at once
                settings = ", ".join(f"model.{path} = {value!r}" for path, value in field.read(config).items())
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
        if key not in meanings:
            supported = False
        text = repr(value)
        rows.append([key, text if len(text) < 40 else f"{text[:36]}…", meanings.get(key, "NOT KNOWN") or "supported"])
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
