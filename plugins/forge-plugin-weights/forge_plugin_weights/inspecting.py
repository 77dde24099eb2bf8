"""What a configuration means to Forge."""

from __future__ import annotations

from collections.abc import Sequence

from forge_plugin_weights.kinds import ArchitectureComponent, Config, Unsupported
from forge_plugin_weights.tables import HARMLESS, all_fields

NOTHING = "no meaning for the model"


def describe(architecture: ArchitectureComponent, config: Config) -> tuple[list[Sequence[str]], bool]:
    """Returns a row for each key of a configuration, and whether Forge supports all of it."""
    meanings: dict[str, str] = dict.fromkeys((*HARMLESS, *architecture.harmless), NOTHING)
    supported = True
    for field in all_fields(architecture):
        try:
            settings = ", ".join(f"model.{path} = {value!r}" for path, value in field.read(config).items())
            settings = "; ".join(filter(None, (settings, field.remark(config))))
        except Unsupported as error:
            settings, supported = f"NOT SUPPORTED: {error}", False
        for key in field.keys:
            meanings[key] = "; ".join(filter(None, (meanings.get(key, ""), settings)))
    rows: list[Sequence[str]] = []
    for key, value in config.items():
        if key not in meanings:
            supported = False
        text = repr(value)
        rows.append([key, text if len(text) < 40 else f"{text[:36]}…", meanings.get(key, "NOT KNOWN") or "supported"])
    return rows, supported


def remarks(architecture: ArchitectureComponent, config: Config) -> Sequence[str]:
    """Returns a line for each value of a configuration that is read and has no effect here."""
    return [remark for field in all_fields(architecture) if (remark := field.remark(config))]
