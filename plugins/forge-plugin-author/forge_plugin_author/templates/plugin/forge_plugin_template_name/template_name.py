"""The plugin template_name."""

from __future__ import annotations

from collections.abc import Generator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from attrs import define, field
from attrs.validators import min_len

from forge_core import JobError, Plugin, hookimpl

if TYPE_CHECKING:
    from forge_core.contracts.model import Model


@define(kw_only=True, slots=False)
class TemplateName(Plugin):
    """Freezes the parameters whose names match a glob: they keep their initial or loaded values."""

    match: str = field(validator=min_len(1))
    """Glob over the names of parameters (`layers.*.up.*`); `*` also matches dots."""

    @hookimpl(wrapper=True)
    def forge_build_model(self) -> Generator[None, Model, Model]:
        """Change the built model, of any component: a wrapper yields once for it, and returns the one to use."""
        model = yield
        fitting = [parameter for name, parameter in model.named_parameters() if fnmatchcase(name, self.match)]
        if not fitting:
            names = ", ".join(name for name, _ in model.named_parameters())
            raise JobError(f"no parameter fits match = {self.match!r}; there are {names}")
        for parameter in fitting:
            parameter.requires_grad_(False)
        return model
