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
MODULES: Mapping[str, Sequence[str]] = {
    "forge_core.config.job": ["forge_core.job"],
    "forge_core.components": [f"{CONTRACTS}.components"],
    "forge_core.context": [f"{CONTRACTS}.contexts"],
    "forge_core.deprecation": [f"{CONTRACTS}.deprecation"],
    "forge_core.cross_entropy": ["forge_core.losses"],
    "forge_core.errors": [f"{CONTRACTS}.errors"],
    "forge_core.hookspecs": [f"{CONTRACTS}.hookspecs"],
    "forge_core.protocols": [f"{CONTRACTS}.{name}" for name in ("model", "data", "optimizer", "runtime")],
    "forge_core.engine.evaluation_context": [f"{CONTRACTS}.contexts"],
    "forge_core.engine.parameters": [f"{CONTRACTS}.parameters"],
    "forge_core.engine.plain_executor": ["forge_core.engine.executor"],
    "forge_core.engine.state": ["forge_core.checkpoint.state"],
    "forge_core.engine.matrix_optimizer": ["forge_kit.matrix_optimizer"],
    "forge_core.parallel.whole_matrices": ["forge_kit.whole_matrices"],
    "forge_core.modules": ["forge_kit.modules"],
    "forge_core.data.cache": ["forge_kit.cache"],
}
"""Modules that were documented, each with the modules that now have its names."""
TESTING = "forge_core.testing"
"""A package that became `forge_testing`, with all that is below it."""


class MovedModules(MetaPathFinder):
    """Finds modules under the paths that they had, after every other finder has failed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        homes = _homes(fullname)
        return ModuleSpec(fullname, _Forward(homes), is_package=fullname == TESTING) if homes else None


def _homes(name: str) -> Sequence[str]:
    if name == TESTING or name.startswith(f"{TESTING}."):
        return [name.replace(TESTING, "forge_testing", 1)]
    return MODULES.get(name, ())


class _Forward(Loader):
    """Makes a module that takes each name from where it is now, with the warning."""

    def __init__(self, homes: Sequence[str]) -> None:
        self._homes = homes

    def exec_module(self, module: ModuleType) -> None:
        for home in self._homes:
            try:
                import_module(home)
            except ModuleNotFoundError as error:
                if error.name != home.partition(".")[0]:
                    raise
                distribution = str(error.name).replace("_", "-")
                hint = f"{module.__name__} is now {home}: pip install {distribution}"
                raise ModuleNotFoundError(hint, name=error.name) from error
        vars(module)["__getattr__"] = forwarding(module.__name__, self._homes)


def forwarding(old: str, homes: Sequence[str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that looks its names up in other modules.

    Args:
        old: the module's name.
        homes: modules that have its public names now.
    """

    def find(name: str) -> Any:
        from forge_core.contracts.deprecation import deprecated  # late: importing forge_core must not import attrs

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
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
