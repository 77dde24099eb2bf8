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
    """Freezes the parameters whose names fit a pattern: they keep their initial or loaded values."""

    match: str = field(validator=min_len(1))
    """Pattern of a shell over the names of parameters (`layers.*.up.*`); `*` stands for any characters, dots
    included."""

    @hookimpl(wrapper=True)
    def forge_build_model(self) -> Generator[None, Model, Model]:
        """Change what was built, whoever built it: a wrapper yields once, and returns what shall be used."""
        model = yield
        fitting = [parameter for name, parameter in model.named_parameters() if fnmatchcase(name, self.match)]
        if not fitting:
            names = ", ".join(name for name, _ in model.named_parameters())
            raise JobError(f"no parameter fits match = {self.match!r}; there are {names}")
        for parameter in fitting:
            parameter.requires_grad_(False)
        return model
