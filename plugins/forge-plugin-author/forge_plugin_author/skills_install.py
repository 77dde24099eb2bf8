"""`forge-run skills install`: copies skills to where a coding assistant looks for them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from forge_core.cli.command_line import with_examples
from forge_core.contracts.errors import ExitCode
from forge_kit.tools.json_output import add_json, print_json
from forge_kit.tools.output_schema import TEXT, Schema, array, by_name, keyed
from forge_plugin_author.skill_files import TARGETS, install, select_skills, target_folder

HEADING = "extend"


def command(argv: list[str]) -> int:
    """Install skills where a coding assistant looks for them.

    Files that you have changed are not overwritten. The versions of the installed packages are recorded.
    """
    parser = argparse.ArgumentParser("forge-run skills install", description=command.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="skills (all)")
    folders = ", ".join(f"{name} ({folder})" for name, folder in TARGETS.items())
    parser.add_argument(
        "--target", required=True, metavar="DIR", help=f"a folder, or an assistant, for its folder: {folders}"
    )
    replace = "replace files, too, that were changed since they were installed, or that Forge did not write"
    parser.add_argument("--overwrite", action="store_true", help=replace)
    add_json(parser)
    with_examples(
        parser, "forge-run skills install --target claude", "forge-run skills install start-a-run --target ~/skills"
    )
    options = parser.parse_args(argv)
    skills, folder = select_skills(options.names), target_folder(options.target)
    install(skills, folder, overwrite=options.overwrite)
    missing = {skill.name: names for skill in skills if (names := skill.missing())}
    if options.json:
        print_json({"folder": folder, "skills": [skill.name for skill in skills], "missing": missing})
        return ExitCode.FINISHED
    print(f"installed in {folder}: {', '.join(skill.name for skill in skills)}")
    # Not an error: an assistant may install them when a task needs them
    for name, names in missing.items():
        print(f"{name} uses packages that are not installed: pip install {' '.join(names)}")
    return ExitCode.FINISHED


def outputs() -> Mapping[str, Schema]:
    """Returns the schemas of what it prints with `--json`, by action."""
    return {"": keyed(folder=TEXT, skills=array(TEXT), missing=by_name(array(TEXT)))}
