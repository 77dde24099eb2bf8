"""The table of families in docs/bring-a-model.md; `python tests/test_families_table.py` writes it again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from drawn_configs import INSTALLED
from published_models import SIZES, Published
from test_published_vision import PARTS_TOO, WHOLE_TOO
from test_weights_layouts import LIKE_LLAMA, MODELS, TOWER_LAYOUTS, TOWERS, has_experts

from forge_plugin_weights.fields import ExportedAs

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PAGE = ROOT / "docs" / "bring-a-model.md"
README = HERE.parent / "README.md"
HEAD = ("| `model_type` | in | out | logits | layouts | configuration |", "|---|---|---|---|---|---|")
PARTS = {"siglip": "siglip_vision_model", "siglip2": "siglip2_vision_model", "clip": "clip_vision_model"}
PARTS |= {name: f"{name}_text" for name in ("gemma3", "gemma3n", "gemma4", "llama4")} | {"mistral3": "ministral3"}
"""Architectures of a part, by the `model_type` of the whole whose published configuration is read."""


def rows() -> Iterator[str]:
    read = configurations()
    for type_ in sorted(INSTALLED):
        out = next((each.model_type for each in INSTALLED[type_].fields() if isinstance(each, ExportedAs)), "")
        compared = f"as `{out}`" if out else "features, 1e-9" if type_ in TOWERS else "1e-9"
        cells = (f"`{type_}`", "yes", f"as `{out}`" if out else "yes", compared, layouts(out or type_), read[type_])
        yield f"| {' | '.join(cells)} |"


def layouts(type_: str) -> str:
    """The layouts under which test_weights_layouts.py compares an import and its export with those of one process."""
    names = [name for name in MODELS if name.partition(",")[0] == type_]
    if type_ in LIKE_LLAMA:
        return "as `llama`"
    if type_ in TOWERS:
        return ", ".join(layout.rstrip("2") for layout in TOWER_LAYOUTS)
    divided = ["tp"] if any(kv_heads(name) % 2 == 0 for name in names) else []
    experts = ["ep"] if any(has_experts(name) for name in names) else []
    return ", ".join(["fsdp", *divided, "pp", *experts])


def kv_heads(name: str) -> int:
    """The number that ranks divide; of a model without the key, one that they can."""
    if isinstance(MODELS[name], Published):
        keys = {**SIZES, **MODELS[name].keys}
        return 2 if keys["num_key_value_heads"] is ... else keys["num_key_value_heads"]
    return getattr(MODELS[name].model().config.get_text_config(), "num_key_value_heads", None) or 2


def configurations() -> dict[str, str]:
    """What configurations the tests read of each architecture: published ones, or those that a class writes."""
    read = dict.fromkeys(INSTALLED, "class")
    for file in ("published_configs.json", "published_vision_configs.json"):
        for name, config in json.loads((HERE / file).read_text()).items():
            found = "some keys of a file" if name.endswith("some keys") else "published file"
            whole = config["model_type"]
            if whole not in read or file == "published_configs.json":
                whole = PARTS.get(whole, whole)
            too = [type_ for type_ in (config["model_type"],) if type_ in WHOLE_TOO]
            for type_ in (whole, *too, *filter(None, [PARTS_TOO.get(name)])):
                read[type_] = min(read[type_], found, key=("published file", "some keys of a file", "class").index)
    return read


def test_the_table_has_what_the_tests_cover() -> None:
    lines = PAGE.read_text().splitlines()
    start = lines.index(HEAD[0])
    table = [*HEAD, *rows()]
    assert lines[start : start + len(table) + 1] == [*table, ""]


def test_the_readme_lists_every_architecture_with_its_class() -> None:
    listed = re.findall(r"^\| (`[^|]*`) \| `(\w+)` \|", README.read_text(), re.MULTILINE)
    classes = {type_: name for types, name in listed for type_ in re.findall(r"`(\w+)`", types)}
    assert {type_: classes.get(type_) for type_ in INSTALLED} == {type_: each.name for type_, each in INSTALLED.items()}


if __name__ == "__main__":
    text = PAGE.read_text()
    pattern = re.escape("\n".join(HEAD)) + r"\n(\|.*\n)*"
    PAGE.write_text(re.sub(pattern, "\n".join([*HEAD, *rows()]).replace("\\", r"\\") + "\n", text))
