"""template_name keeps the contracts of plugins and of loggers, and does what it says."""

from forge_plugin_template_name import TemplateName
from forge_plugin_template_name.table import Table

from forge_testing.distribution import check_distribution
from forge_testing.suites import LoggerSuite


def test_the_distribution():
    check_distribution("forge-plugin-template-name")


class TestTemplateName(LoggerSuite):
    component = TemplateName(file="table.csv")

    def recorded_steps(self, folder):
        lines = (folder / "table.csv").read_text().splitlines()[1:]
        return [int(line.partition(",")[0]) for line in lines]


def test_a_step_is_a_line_with_the_columns_asked_for(tmp_path):
    table = Table(tmp_path / "table.csv", ["lr", "loss"])
    table.start(0)
    table.log({"step": 1, "loss": 2.5, "lr": 0.1, "tokens": 64})
    table.log({"step": 1, "eval/loss": 2.0})
    table.log({"step": 2, "loss": 2.25})
    table.close()
    assert (tmp_path / "table.csv").read_text() == "step,lr,loss\n1,0.1,2.5\n2,,2.25\n"
