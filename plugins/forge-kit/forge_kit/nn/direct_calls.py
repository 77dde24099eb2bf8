"""Direct calls of small modules, for which the cost of `nn.Module` counts, as in generation token by token.

A call of a module looks for hooks, and a parameter or child is found only after a search that fails. For one position
of a small model this takes as long as the matrix products. A class may declare by `directly_callable` that `direct`
can make a copy of its modules that holds parameters and children as plain attributes and whose call is `forward`.
"""

from __future__ import annotations

from inspect import isfunction
from operator import is_
from typing import Any, TypeVar

from torch import nn

from forge_kit.torch_internals import buffers_of, children_of, hooks_registered, is_called_plainly, parameters_of

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def _methods(cls: type[nn.Module]) -> frozenset[str]:
    """Returns the names of the methods that the class adds to `nn.Module`: one may be replaced on an instance."""
    return frozenset(name for name in dir(cls) if isfunction(getattr(cls, name)) and not hasattr(nn.Module, name))


def _copied(cls: type[nn.Module]) -> tuple[Any, frozenset[str]]:
    """Returns the class of direct copies, of which a call is a call of `forward`, and the methods of the class."""
    members = {"__call__": cls.forward, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), members), _methods(cls)


_classes: dict[type[nn.Module], tuple[Any, frozenset[str]]] = {nn.Identity: _copied(nn.Identity)}


def directly_callable(cls: type[AnyModule]) -> type[AnyModule]:
    """Class decorator: `direct` may copy modules of this class, not of classes derived from it.

    Their `forward` and what it calls read attributes of the module, and assign none: a copy would get the value, and
    not the module.
    """
    _classes[cls] = _copied(cls)
    return cls


def direct(module: nn.Module) -> nn.Module:
    """Returns a copy that computes what the module computes, by the same code; else the module itself.

    The copy shares parameters and buffers. Its children are copied likewise: one that has a hook, that a stage has
    replaced or whose class does not allow it stays as it is, and is called as usual.
    """
    if type(module) not in _classes or not is_called_plainly(module):
        return module
    copied, methods = _classes[type(module)]
    if not methods.isdisjoint(vars(module)):
        return module
    # Without `__init__`, which would make parameters
    copy: nn.Module = object.__new__(copied)
    children = {name: None if child is None else direct(child) for name, child in children_of(module).items()}
    # Not by setattr, which would register them as a module's, to be found by a search again.
    vars(copy).update({**vars(module), **parameters_of(module), **buffers_of(module), **children})
    return copy


class DirectCalls:
    """The direct copies of some modules, by name, made when they are first asked for.

    A hook that is registered later, and a parameter or child that is replaced, are noticed at the next call.
    """

    def __init__(self) -> None:
        # No number of hooks, so that the first call makes the copies
        self._hooks = -1
        self._copies: dict[str, tuple[nn.Module, nn.Module]] = {}
        """Each module and its copy."""
        self._places: list[dict[str, Any]] = []
        """For each parameter, buffer and child of a copied module: the dictionary in which the module holds it,"""
        self._names: list[str] = []
        """its name there,"""
        self._held: list[Any] = []
        """and what the copy holds."""

    def __call__(self, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
        """Returns the copies of these modules."""
        if not self._are_current():
            self._forget()
        return {name: self._copy(name, module) for name, module in modules.items()}

    def _forget(self) -> None:
        self._hooks = hooks_registered()
        self._copies.clear()
        self._places.clear()
        self._names.clear()
        self._held.clear()

    def _copy(self, name: str, module: nn.Module) -> nn.Module:
        original, copy = self._copies.get(name, (None, module))
        if original is module:
            return copy
        copy = direct(module)
        self._copies[name] = module, copy
        if copy is not module:
            self._note(module, copy)
        return copy

    def _note(self, module: nn.Module, copy: nn.Module) -> None:
        for place in (parameters_of(module), buffers_of(module), children_of(module)):
            self._places += [place] * len(place)
            self._names += place.keys()
            self._held += place.values()
        for name, child in children_of(module).items():
            if child is not None and vars(copy)[name] is not child:
                self._note(child, vars(copy)[name])

    def _are_current(self) -> bool:
        # Without a loop in Python, as it runs for each token.
        values = map(dict.get, self._places, self._names)
        return self._hooks == hooks_registered() and all(map(is_, values, self._held))
