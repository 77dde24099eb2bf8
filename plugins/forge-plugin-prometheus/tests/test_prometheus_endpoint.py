"""What Prometheus reads: by HTTP and from the textfile, by the parser of its own library."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forge_core.contracts.components import TrainingHook
from forge_core.contracts.errors import ExitCode, ForgeError
from forge_plugin_prometheus import Prometheus
from forge_plugin_prometheus.exporter import PrometheusLogger
from forge_testing.refusals import naming, refuses


def samples(text):
    """{(name, further labels): value}; each has the label of the run."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "mine"
            found[sample.name, *labels.values()] = sample.value
    return found


def scrape(folder):
    url = json.loads((folder / "prometheus.json").read_text())["url"]
    with urllib.request.urlopen(url, timeout=10) as answer:
        return samples(answer.read().decode())


@pytest.fixture
def logger(tmp_path):
    logger = PrometheusLogger(Prometheus(port=0, textfile=str(tmp_path / "forge.prom")), "mine", tmp_path)
    logger.start(3)
    yield logger
    logger.close()


def test_the_endpoint_has_the_newest_numbers(logger, tmp_path):
    assert scrape(tmp_path)["forge_steps_total",] == 3
    logger.log(
        {
            "step": 4,
            "tokens": 64,
            "loss": 2.5,
            "grad_norm": math.inf,
            "time": 1e9,
            "counts": {"moe/load": {"0": [1.0, 5.0]}},
        }
    )
    logger.log({"step": 4, "eval/loss": math.nan, "eval_loss": 7, "note": "text"})
    found = scrape(tmp_path)
    assert (found["forge_steps_total",], found["forge_loss",], found["forge_grad_norm",]) == (4, 2.5, math.inf)
    assert found["forge_tokens_total",] == 64
    assert "forge_tokens" not in {name for name, *_ in found}
    assert math.isnan(found["forge_eval_loss",])
    assert found["forge_eval_loss_2",] == 7
    assert [found[f"forge_moe_load_{name}", "0"] for name in ("min", "mean", "max")] == [1, 3, 5]
    assert found["forge_run_state", "running"] == 1
    assert "forge_note" not in {name for name, *_ in found}


@pytest.mark.parametrize(
    ("code", "state"),
    [(ExitCode.FINISHED, "finished"), (ExitCode.STOPPED, "stopped"), (ExitCode.NON_FINITE, "failed")],
)
def test_the_textfile_says_how_the_run_ended(logger, tmp_path, code, state):
    logger.log({"step": 4, "loss": 2.5})
    logger.end(code, "why")
    found = samples((tmp_path / "forge.prom").read_text())
    assert found["forge_loss",] == 2.5
    states = {labels[0] for (name, *labels), value in found.items() if name == "forge_run_state" and value}
    assert states == {state}


def test_a_run_is_served_while_it_lasts_and_not_after(make_job, train):
    seen = []

    class Scrapes(TrainingHook):
        def on_train_end(self, context):
            seen.append((json.loads((context.folder / "prometheus.json").read_text())["url"], scrape(context.folder)))

    table = Prometheus(port=0, labels={"cluster": "a"})
    summary = train(make_job(steps=2, loggers={"prometheus": table}, job={"name": "mine"}), Scrapes())
    [(url, found)] = seen
    assert found["forge_steps_total", "a"] == 2
    assert found["forge_loss", "a"] == summary.loss
    assert not (summary.folder / "prometheus.json").exists()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5)


def test_a_port_in_use_and_a_textfile_that_cannot_be_written_are_refused(logger, tmp_path):
    port = int(json.loads((tmp_path / "prometheus.json").read_text())["url"].rpartition(":")[2].partition("/")[0])
    with pytest.raises(ForgeError, match=naming(f"127.0.0.1:{port}", "port")):
        PrometheusLogger(Prometheus(port=port), "mine", tmp_path).start(0)
    with pytest.raises(ForgeError, match=naming("missing/forge.prom", "No such file")):
        PrometheusLogger(Prometheus(host="", textfile=str(tmp_path / "missing/forge.prom")), "mine", tmp_path).start(0)


@pytest.mark.parametrize(
    ("keys", "key", "facts"),
    [
        ({"host": ""}, "host", ["textfile"]),
        ({"textfile": "forge.txt"}, "textfile", ["'forge.txt'", ".prom"]),
        ({"labels": {"run": "x"}}, "labels.run", ["'run'"]),
    ],
)
def test_a_wrong_table_is_refused_when_the_job_is_checked(make_job, train, keys, key, facts):
    with refuses(f"loggers.prometheus.{key}", *facts):
        train(make_job(steps=1, loggers={"prometheus": Prometheus(**keys)}))
