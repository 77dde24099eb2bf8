"""Activation of plugins, and the typed facade through which the engine calls hooks.

pluggy is called from this file alone. Each job has its own manager: jobs in one process do not share plugins.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from traceback import walk_tb
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import pluggy
from attrs import frozen

from forge_core.contracts.components import Built, Component, DefaultType, Plugin, TrainingHook
from forge_core.contracts.contexts import BuildContext
from forge_core.contracts.errors import ForgeError, PluginError, Problem, did_you_mean
from forge_core.contracts.hookspecs import PROJECT, ForgeHooks, hookimpl
from forge_core.plugins.catalog import Catalog

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

BUILD_HOOKS: Mapping[str, str] = {"parallel": "forge_build_parallel_stage"}
"""Kinds whose build hook is not called `forge_build_<kind>`."""


@frozen(kw_only=True)
class RunContext(BuildContext):
    """The engine's own context: components see its base."""

    plugins: Plugins


class Plugins:
    """The active plugins of one job, and every hook call as a typed method. Implements `contracts.contexts.Builder`."""

    _undo_backend: ClassVar[list[Callable[[], None]]] = []
    # On the class and not for one job: libraries such as torch are configured for the whole process.

    def __init__(self, plugins: Mapping[str, Plugin], catalog: Catalog) -> None:
        """Register the plugins that a job names, in its order.

        A `PluginError` names the plugin and the hook whose implementation does not fit its specification.
        """
        self.catalog = catalog
        self.active = dict(plugins)
        self._manager = pluggy.PluginManager(PROJECT)
        self._inputs: list[dict[str, Any]] = []
        """Inputs of the builds under way, innermost last."""
        self._manager.add_hookspecs(ForgeHooks)
        for name, plugin in reversed(self.active.items()):  # pluggy calls the last registered first
            self._register(name, plugin)
        # After all are registered: a plugin may implement what another one, named later in the job, specifies.
        self._add_hookspecs()
        self._check_pending()
        # Then the core's own builders, since plugins may have specified build hooks for new kinds.
        hooks = [name for name in self._specified() if name.startswith("forge_build_")]
        self._manager.register(SimpleNamespace(**dict.fromkeys(hooks, self._build_last)), "forge-run")

    def build(self, component: Component[Built], context: BuildContext, **inputs: Any) -> Built:
        """Build a component of any kind: through its build hook if one is specified, else by its own `build`.

        Raises a `PluginError` if the result is None.
        """
        assert not isinstance(component, DefaultType), "defaults are filled in when the job is made"
        kind = component.kind
        hook = getattr(self._manager.hook, BUILD_HOOKS.get(kind, f"forge_build_{kind}"), None)
        self._inputs.append(inputs)
        try:
            with self._blame(component, context.path):
                build = self._build_last if hook is None else partial(hook, **inputs)
                built = build(component=component, context=context)
        finally:
            self._inputs.pop()
        if built is None:
            raise PluginError(f"building {kind} {self.catalog.type_of(type(component))!r} gave None")
        return built

    @hookimpl(trylast=True)
    def _build_last(self, component: Any, context: BuildContext) -> Any:
        """Build the component that the job selected; the core's own implementation of every build hook."""
        # pluggy passes an implementation the arguments that it names. This one serves every kind, including
        # plugins' kinds, whose inputs it cannot name; it finds them where `build` has put them.
        return component.build(context, **self._inputs[-1])

    def configure_backend(self, job: Job, device: torch.device) -> None:
        """Let active plugins configure the process, after undoing what the job before it in this process had done."""
        while self._undo_backend:
            self._undo_backend.pop()()
        with self._blame():
            self._undo_backend.extend(self._manager.hook.forge_configure_backend(job=job, device=device))

    def validate_job(self, job: Job, layout: Layout) -> list[Problem]:
        """Problems that active plugins find, with full paths."""
        return self._results("forge_validate_job", job=job, layout=layout)

    def training_hooks(self, job: Job) -> list[TrainingHook]:
        """Training hooks that active plugins contribute, in the order of the job file."""
        return self._results("forge_training_hooks", job=job)

    def _results(self, hook: str, **arguments: Any) -> list[Any]:
        with self._blame():  # around both: an implementation may be a generator, which runs only here
            return [result for each in getattr(self._manager.hook, hook)(**arguments) for result in each]

    def _register(self, name: str, plugin: Plugin) -> None:
        try:
            self._manager.register(plugin, name)
        except pluggy.PluginValidationError as error:
            raise self._refused(name, error) from error
        except ValueError as error:  # plugins that are equal are one to pluggy
            twin = next(other for other, each in self.active.items() if each == plugin and other != name)
            raise PluginError(f"plugins {twin!r} and {name!r} have the same type and keys; remove one") from error
        implementations = list(self._implementations(plugin))
        if not implementations:
            raise PluginError(
                f"plugin {self._describe(name)} implements no hook; mark its methods with @forge_core.hookimpl"
            )
        for method, function in implementations:
            _check_signature(f"plugin {self._describe(name)}, {method}", function)

    def _add_hookspecs(self) -> None:
        for name, plugin in self.active.items():
            declare = dict(self._implementations(plugin)).get("forge_add_hookspecs")
            if declare is None:
                continue
            try:
                self._manager.add_hookspecs(declare())
            except pluggy.PluginValidationError as error:  # of the plugin that implements a hook declared here
                culprit = next(other for other, active in self.active.items() if active is error.plugin)
                raise self._refused(culprit, error) from error
            except ValueError as error:
                raise self._refused(name, error) from error

    def _refused(self, name: str, error: Exception) -> PluginError:
        return PluginError(f"plugin {self._describe(name)}: {' '.join(str(error).split())}")

    def _check_pending(self) -> None:
        specified = self._specified()
        for name, plugin in self.active.items():
            for method, _ in self._implementations(plugin):
                if method not in specified:
                    raise PluginError(
                        f"plugin {self._describe(name)}: there is no hook {method!r}{did_you_mean(method, specified)}"
                    )

    def _specified(self) -> list[str]:
        return [name for name, caller in vars(self._manager.hook).items() if caller.has_spec()]

    def _implementations(self, plugin: Plugin) -> Iterator[tuple[str, Any]]:
        for name in dir(type(plugin)):
            if self._manager.parse_hookimpl_opts(plugin, name) is not None:
                yield name, getattr(plugin, name)

    def _describe(self, name: str) -> str:
        return f"{name!r} ({self.catalog.type_of(type(self.active[name]))})"

    @contextmanager
    def _blame(self, component: Component | None = None, path: str = "") -> Iterator[None]:
        """Add to an exception which plugin's implementation, and which component, it came through."""
        try:
            yield
        except Exception as error:
            for name in self._plugins_in(error.__traceback__):
                error.add_note(f"in plugin {self._describe(name)}")
            if component is not None and not isinstance(error, ForgeError):
                type_ = self.catalog.type_of(type(component))
                error.add_note(f"while building {component.kind} {type_!r}{f' for {path}' if path else ''}")
            raise

    def _plugins_in(self, traceback: TracebackType | None) -> list[str]:
        # By code objects: a frame does not name the plugin whose method it runs.
        owners = {
            function.__func__.__code__: name
            for name, plugin in self.active.items()
            for _, function in self._implementations(plugin)
        }
        frames = (frame.f_code for frame, _ in walk_tb(traceback))
        return list(dict.fromkeys(owners[code] for code in frames if code in owners))


def _check_signature(where: str, function: Any) -> None:
    """Refuse parameters that pluggy accepts and then never passes."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.default is not parameter.empty:
            raise PluginError(
                f"{where}: parameter {str(parameter)!r} would never be passed; hook implementations take plain "
                "positional parameters without defaults, named as in the specification"
            )
