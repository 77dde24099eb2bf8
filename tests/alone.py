"""Each distribution by itself: its wheel in an environment that has forge-run and the wheel's own requirements only.

    make alone                               # the wheels, and then every distribution
    python tests/alone.py forge-plugin-muon  # this one, from the wheels in dist/
    python tests/alone.py --some             # those of `SOME`

What pip installs with it is shown. Then the checks of authors are installed: `forge-run plugins NAME --check` must find
nothing wrong, a job must run that names each component which needs no key, and its conformance suite must pass, if it
has one, for which its extra `test` is installed: models or tokenizers of others.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
SOME = ("forge-plugin-muon", "forge-plugin-text")
"""What CI tries: one that shares code with others through forge-kit, and one with a dataset and tokenizers."""

JOB = """
train = {{ steps = 3, global_batch_size = 4, seq_len = 8, device = "cpu" }}
job = {{ name = "{name}" }}
{tables}
[[data.sources]]
type = "forge_testing:{source}"
"""
TABLES = {
    "model": '[model]\ntype = "forge_testing:TinyModel"\n',
    "optimizer": '[optimizer]\ntype = "forge_testing:TinyAdamW"\n',
}
PLACES = {"optimizer": "optimizer", "scheduler": "scheduler", "loss": "loss", "executor": "executor"}
PLACES |= {"packing": "data.packing", "logger": "loggers.it", "hook": "hooks.it", "plugin": "plugins.it"}
PLACES |= {"parallel": "parallel.it", "evaluation": "evaluations.it"}
"""By kind, where a job names a component."""

OFFERS = """
import json
from forge_core import Catalog
from forge_core.config.keys import resolved_fields
from attrs import NOTHING
catalog = Catalog.installed()
mine = [offer for offer in catalog.offers() if offer.distribution and offer.distribution.name == {name!r}]
found = []
for offer in mine:
    if offer.kind in {kinds!r}:
        component = catalog.load(offer.kind, offer.type)
        if not any(field.default is NOTHING for field in resolved_fields(component).values()):
            found.append((offer.kind, offer.type))
print(json.dumps(found))
"""


def main() -> None:
    known = sorted(
        path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml") if "entry-points" in path.read_text()
    )
    names = list(SOME) if sys.argv[1:] == ["--some"] else sys.argv[1:] or known
    with tempfile.TemporaryDirectory() as folder:
        base = Environment(Path(folder) / "base")
        core = wheel_of("forge_run")
        base.pip("install", "--quiet", os.environ.get("TORCH", "torch==2.13.0"), str(core), "pytest")
        for name in names:
            started = time.monotonic()
            told = try_alone(name, base, Path(folder) / name)
            print(f"{name}: {told}  ({time.monotonic() - started:.0f} s)", flush=True)


def try_alone(name: str, base: Environment, folder: Path) -> str:
    """Install a distribution beside `base`, and see that it works; returns what was seen."""
    own = Environment(folder, beneath=base)
    before = own.installed()
    wheel = wheel_of(name.replace("-", "_"))
    # A plugin may require another, which is among the wheels too.
    own.pip("install", "--quiet", "--find-links", str(DIST), str(wheel))
    added = sorted(own.installed() - before)
    own.pip("install", "--quiet", "--find-links", str(DIST), str(wheel_of("forge_plugin_author")))
    own.run("-m", "forge_core", "plugins", name, "--check")
    trained = [type_ for kind, type_ in own.jobs(name) if own.train(kind, type_, name)]
    own.pip("install", "--quiet", "--find-links", str(DIST), f"{wheel}[test]")
    suite = own.suite(name)
    return f"installed {', '.join(added)}; jobs with {', '.join(trained) or 'none'}; {suite}"


def wheel_of(distribution: str) -> Path:
    [wheel] = DIST.glob(f"{distribution}-*.whl")
    return wheel


class Environment:
    """A virtual environment, which may see the packages of another."""

    def __init__(self, folder: Path, beneath: Environment | None = None) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        self.folder, self.python = folder, folder / "bin" / "python"
        [self.packages] = (folder / "lib").glob("python*/site-packages")
        if beneath is not None:
            (self.packages / "beneath.pth").write_text(f"{beneath.packages}\n")

    def run(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run this environment's Python; returns what it prints."""
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=cwd or self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{' '.join(arguments)} failed in {self.folder.name}:\n{done.stdout}")
        return done.stdout

    def pip(self, *arguments: str) -> None:
        self.run("-m", "pip", "--disable-pip-version-check", *arguments)

    def installed(self) -> set[str]:
        code = "from importlib.metadata import distributions as d; print(*{x.name for x in d()}, sep='\\n')"
        return set(self.run("-c", code).split())

    def jobs(self, name: str) -> Iterator[tuple[str, str]]:
        """Kind and type of the components that a job can name without a key."""
        yield from map(tuple, json.loads(self.run("-c", OFFERS.format(name=name, kinds=[*PLACES, "model"]))))

    def train(self, kind: str, type_: str, distribution: str) -> bool:
        """Run a job with a component; whether it needs no more than its defaults."""
        place = PLACES.get(kind, kind)
        tables = TABLES | {place: f'[{place}]\ntype = "{distribution}/{type_}"\n'}
        path = self.folder / f"{kind}-{type_}.toml"
        source = "RandomDocuments" if kind == "packing" else "Numbers"  # which gives sequences, with nothing to pack
        path.write_text(JOB.format(name=f"{kind}-{type_}", tables="".join(tables.values()), source=source))
        check = [str(self.python), "-c", "import sys, forge_core; forge_core.load_job(sys.argv[1])", str(path)]
        if subprocess.run(check, cwd=self.folder, capture_output=True).returncode:
            return False
        self.run("-m", "forge_core", "run", path.name)
        return True

    def suite(self, name: str) -> str:
        """Run what holds the distribution to its kinds' contracts; returns pytest's last line."""
        tests = self.folder / "tests"
        shutil.copytree(ROOT / "plugins" / name / "tests", tests, ignore=shutil.ignore_patterns("__pycache__"))
        sources = sorted(str(path.relative_to(self.folder)) for path in tests.rglob("test_*_conformance.py"))
        if not sources:
            return "no conformance suite"
        pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib")
        return self.run(*pytest, *sources).strip().splitlines()[-1]


if __name__ == "__main__":
    main()
