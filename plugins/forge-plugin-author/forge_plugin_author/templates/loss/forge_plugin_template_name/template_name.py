"""The component template_name: its keys in a job file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core import LossComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.runtime import LossFunction


@frozen(kw_only=True)
class TemplateName(LossComponent):
    """Focal loss (Lin et al. 2017).

    A token that is predicted with probability p counts (1 - p)^gamma of its cross-entropy, so that easy tokens matter
    less. The reported loss is the plain cross-entropy.
    """

    gamma: float = field(default=2.0, validator=ge(1))
    """Exponent: with 2, a token of probability 0.9 counts a hundredth."""

    def build(self, context: BuildContext) -> LossFunction:
        from forge_plugin_template_name.focal import focal_loss

        return focal_loss(self.gamma)
