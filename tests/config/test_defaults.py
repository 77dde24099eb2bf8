"""`defaults.json` records the default and the validator of each key: jobs rely on them, so no change goes unnoticed.

python tests/config/test_defaults.py  # writes the record; say in CHANGELOG.md what has changed
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from attrs import NOTHING

from forge_core.config.keys import default_of, resolved_fields
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_plugin_author.explain import section_in

NO_COMPONENTS = ("kind", "command")
RECORD = Path(__file__).with_name("defaults.json")


def defaults_of(cls: type) -> dict[str, str]:
    """The defaults of the keys of a table, and of tables in it, as Python writes them, and their validators."""
    found = {}
    for key, attribute in resolved_fields(cls).items():
        default = default_of(attribute)
        found[key] = "(required, or depends on other keys)" if default is NOTHING else repr(default)
        if attribute.validator is not None:
            found[key] += "; " + re.sub(r" at 0x[0-9a-f]+", "", repr(attribute.validator))
        if (section := section_in(attribute.type)) is not None:
            found |= {f"{key}.{inner}": value for inner, value in defaults_of(section).items()}
    return found


def defaults() -> dict[str, dict[str, str]]:
    """Those of the sections of a job, and of every component of this repository."""
    catalog = Catalog.installed()
    offers = [offer for kind in catalog.types("kind") if kind not in NO_COMPONENTS for offer in catalog.offers(kind)]
    ours = [offer for offer in offers if offer.distribution.name.startswith("forge-")]
    classes = {f"{each.kind} {each.qualified}": catalog.load(each.kind, each.qualified) for each in ours}
    return {name: defaults_of(cls) for name, cls in sorted({"job": Job, **classes}.items())}


def test_no_default_changes_by_the_way():
    assert defaults() == json.loads(RECORD.read_text())


if __name__ == "__main__":
    RECORD.write_text(json.dumps(defaults(), indent=1) + "\n")
