"""template_name keeps the contracts of plugins and of losses."""

from forge_plugin_template_name import TemplateName

from forge_testing.distribution import check_distribution
from forge_testing.suites import LossSuite


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


class TestTemplateName(LossSuite):
    component = TemplateName(gamma=2.0)

    def objective(self, logits, labels):
        """What the loss shall be, written plainly: the suite compares sums and gradients with it in float64."""
        cross_entropy = self.reported(logits, labels)
        return (1 - (-cross_entropy).exp()) ** 2 * cross_entropy
