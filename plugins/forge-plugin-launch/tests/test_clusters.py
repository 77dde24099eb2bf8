"""What a cluster of two nodes runs: on loopback, stopped in the middle, and continued to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_plugin_launch import Cluster
from forge_plugin_launch.submit import Request
from forge_testing.nodes import SLOW_HOOK, SLOW_JOB, Nodes, digest_of


@pytest.mark.slow
def test_a_run_on_two_nodes_that_is_preempted_continues_to_the_bit(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "slow.py").write_text(SLOW_HOOK)
    monkeypatch.chdir(tmp_path)
    cluster = Cluster(nodes=2, gpus_per_node=0)
    scripts = {}
    for name in ("whole", "preempted"):
        Path(f"{name}.toml").write_text(SLOW_JOB.replace("NAME", name))
        [run] = Request(groups=[[f"{name}.toml"]], overrides=[], cluster=cluster).check([])
        scripts[name] = f"exec {cluster.node_command(run, '$NODE', '$FIRST')}"
    places = [{"NODE": str(number), "FIRST": "127.0.0.1"} for number in range(2)]
    with Nodes(scripts["whole"], places, tmp_path) as nodes:
        assert nodes.wait() == [0, 0]
    with Nodes(scripts["preempted"], places, tmp_path) as nodes:
        nodes.wait_for_step(Path("runs/preempted"), 15)
        nodes.preempt()
        assert nodes.wait() == [75, 75]
    with Nodes(scripts["preempted"], places, tmp_path) as nodes:
        assert nodes.wait() == [0, 0]
    assert digest_of(Path("runs/preempted"), 40) == digest_of(Path("runs/whole"), 40)
