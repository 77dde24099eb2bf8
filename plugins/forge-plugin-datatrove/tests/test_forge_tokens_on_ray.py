"""`ForgeTokens` by datatrove's executor for Ray, where Ray is installed: its wheel of 80 MB is in no extra."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

import pytest
from cleaning_files import write_lines

from forge_core.cli import main

pytest.importorskip("ray", reason="needs Ray: pip install ray")

PROGRAM = """
import sys
import ray
from datatrove.executor.ray import RayPipelineExecutor
from forge_plugin_datatrove import ForgeJoin, ForgeTokens

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, _memory=2_000_000_000)
arguments = sys.argv[1:]
options = {"mem_per_cpu_gb": 0.5, "workers": 2}
parts = RayPipelineExecutor([ForgeTokens(arguments)], tasks=3, logging_dir="logs/parts", **options)
RayPipelineExecutor([ForgeJoin(arguments)], tasks=1, logging_dir="logs/join", depends=parts, **options).run()
"""


@pytest.mark.slow
def test_the_folder_has_the_bytes_of_one_command(folder: Path) -> None:
    write_lines(folder / "in/a.jsonl", [{"text": f"document number {n}"} for n in range(50)])
    arguments = [str(folder / "in"), "--tokenizer", "bytes", "--held-out-every", "5", "--shard-tokens", "300"]
    # In a process of its own, which Ray's processes end with
    subprocess.run([sys.executable, "-c", PROGRAM, *arguments, "--out", str(folder / "three")], check=True, timeout=600)
    assert main(["data", "prepare", *arguments, "--out", "one", "--workers", "1"]) == 0
    names = sorted(str(path.relative_to("one")) for path in Path("one").rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to("three")) for path in Path("three").rglob("*") if path.is_file())
    assert filecmp.cmpfiles("one", "three", names, shallow=False) == (names, [], [])
