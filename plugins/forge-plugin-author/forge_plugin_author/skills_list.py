"""`forge-run skills list`: the skills for coding assistants that are shipped."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from forge_core.cli.command_line import with_examples
from forge_core.contracts.errors import ExitCode
from forge_kit.tools.commands import wrapped
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import TEXT, Schema, array, keyed
from forge_plugin_author.skill_files import shipped_skills

HEADING = "extend"
GROUP = "Skills for coding assistants."


def command(argv: list[str]) -> int:
    """List the skills, with what each is for.

    A skill is a folder of instructions that a coding assistant reads when a task needs it.
    """
    parser = argparse.ArgumentParser("forge-run skills list", description=command.__doc__)
    add_json(parser)
    with_examples(parser, "forge-run skills list", "forge-run skills list --json")
    options, skills = parser.parse_args(argv), shipped_skills()
    if options.json:
        print_json(
            [
                {
                    "name": skill.name,
                    "description": skill.description,
                    "packages": skill.packages,
                    "missing": skill.missing(),
                    "folder": skill.folder,
                }
                for skill in skills
            ]
        )
        return ExitCode.FINISHED
    for skill in skills:
        # A skill can be read without them, and its commands say what to install
        missing = f"\n    not installed: {' '.join(names)}" if (names := skill.missing()) else ""
        print(f"{skill.name}\n{wrapped(skill.description, '    ')}{missing}")
    return ExitCode.FINISHED


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    return {"": array(keyed(name=TEXT, description=TEXT, packages=array(TEXT), missing=array(TEXT), folder=TEXT))}
