"""Old import paths of public names, which keep working for one minor version with a `ForgeDeprecation`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

REMOVED_IN = "0.3"
CONTRACTS = "forge_core.contracts"
TO_CONTRACTS = ("components", "deprecation", "errors", "hookspecs")
TO_KIT = (
    *("data.cache", "engine.matrix_optimizer", "engine.trained"),
    *("launch.supervisor", "modules", "parallel.whole_matrices"),
)
MODULES: Mapping[str, Sequence[str]] = {
    **{f"forge_core.{name}": [f"{CONTRACTS}.{name}"] for name in TO_CONTRACTS},
    **{f"forge_core.{name}": [f"forge_kit.{name.rpartition('.')[2]}"] for name in TO_KIT},
    "forge_core.config.job": ["forge_core.job"],
    "forge_core.config.dump": ["forge_core.config.load"],
    "forge_core.context": [f"{CONTRACTS}.contexts"],
    "forge_core.cli.plugins": ["forge_plugin_author.plugins"],
    "forge_core.cross_entropy": ["forge_core.losses"],
    "forge_core.protocols": [f"{CONTRACTS}.{name}" for name in ("model", "data", "optimizer", "runtime")]
    + ["forge_kit.dispatch", "forge_kit.former_protocols", "forge_kit.modules"],
    "forge_core.engine.evaluation_context": [f"{CONTRACTS}.contexts"],
    "forge_core.engine.parameters": [f"{CONTRACTS}.optimizer"],
    "forge_core.engine.plain_executor": ["forge_core.engine.executor"],
    "forge_core.engine.state": ["forge_core.checkpoint.state"],
}
"""Modules that were documented, each with the modules that now have its names."""
TESTING = "forge_core.testing"
"""A package that became `forge_testing`, with all that is below it."""


def _homes(name: str) -> Sequence[str]:
    if name == TESTING or name.startswith(f"{TESTING}."):
        return [name.replace(TESTING, "forge_testing", 1)]
    return MODULES.get(name, ())


class MovedModules(MetaPathFinder, Loader):
    """Finds modules under the paths that they had; they take each name from its new path, with the warning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=fullname == TESTING) if _homes(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        # Imported at once, although names are looked up late: `import forge_core.modules` without forge-kit must fail
        # as an import, with the line that installs it.
        homes = _homes(module.__name__)
        import_home(module.__name__, homes[0])
        vars(module)["__getattr__"] = forwarding(module.__name__, homes)


def import_home(name: str, home: str) -> ModuleType:
    """Import the module `home`, where `name` is now; an error has the line that installs the distribution."""
    try:
        return import_module(home)
    except ModuleNotFoundError as error:
        if error.name != home.partition(".")[0]:  # something that the new module itself imports is missing
            raise
        hint = f"{name} is now {home}: pip install {error.name.replace('_', '-')}"
        raise ModuleNotFoundError(hint, name=error.name) from error


def forwarding(old: str, homes: Sequence[str]) -> Callable[[str], Any]:
    """A module's `__getattr__`: public names that the module `old` had are looked up in the modules `homes`."""

    def find(name: str) -> Any:
        from forge_core.contracts.deprecation import deprecated  # late: importing forge_core must not import attrs

        # Tools ask every module for names such as `__path__`; these must not import or warn.
        for home in homes if not name.startswith("__") else ():
            module = sys.modules.get(home) or import_module(home)
            if hasattr(module, name):
                notice = deprecated(f"importing {name} from {old}", REMOVED_IN, f"import it from {home}")
                warnings.warn(notice, stacklevel=2)
                return getattr(module, name)
        raise AttributeError(f"module {old!r} has no attribute {name!r}")

    return find


def install() -> None:
    """Let `import` find moved modules; once."""
    # Last: a module that exists under an old path, or that a test puts there, is found before this is asked.
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
