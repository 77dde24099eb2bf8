"""`[slurm]`: phases are queued as arrays by datatrove's executor, with stand-ins for SLURM's programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from cleaning_files import Command, lines_of, write_lines, write_table

# Runs the tasks of an array at once, one after the other; the log has what it was given
SBATCH = """#!/bin/bash
script="${@: -1}"
echo "$@" >> sbatch.log
grep '^#SBATCH' "$script" >> sbatch.log
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
for task in $(seq 0 "$last"); do
    SLURM_ARRAY_TASK_ID=$task SLURM_JOB_ID=7 SLURM_NODELIST=here RUN_OFFSET=0 bash "$script" > task.log 2>&1 || true
done
echo "Submitted batch job 7"
"""
SRUN = """#!/bin/bash
while [ "$1" != launch_pickled_pipeline ]; do shift; done
exec "$@"
"""
TABLE = 'tasks = 2\n{}\n[slurm]\ntime = "1:00:00"\npartition = "cpu"\ncpus_per_task = 3\n'


@pytest.fixture
def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with documents, in which SLURM's programs are found first, and then those of this Python."""
    write_lines(folder / "in/a.jsonl", [{"id": str(n), "text": f"text {n % 3}"} for n in range(8)])
    programs = {"sbatch": SBATCH, "srun": SRUN, "scontrol": "#!/bin/bash\necho here\n"}
    for name, text in programs.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    places = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(places))
    return folder


def test_the_same_command_queues_and_completes(slurm: Path, data: Command) -> None:
    write_table(slurm, TABLE.format('[[filter]]\ntype = "regex"\nregex_exp = "2"'))
    assert data("filter") == {"queued": {"1-filter": 2}, "job": "7"}
    assert not (slurm / "out/filter/documents").exists()
    log = (slurm / "sbatch.log").read_text()
    for option in ("--array=0-1", "--time=1:00:00", "--cpus-per-task=3", "--job-name=forge-filter-1-filter"):
        assert f"#SBATCH {option}" in log
    assert data("filter")["kept"] == 6
    assert [each["id"] for each in lines_of(slurm / "out/filter/documents")] == ["0", "1", "3", "4", "6", "7"]


@pytest.mark.thorough
def test_tasks_that_failed_are_queued_again_only_if_told(
    slurm: Path, data: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slurm / "my_steps.py").write_text(
        "from pathlib import Path\nfrom datatrove.pipeline.filters.base_filter import BaseFilter\n"
        "class Fails(BaseFilter):\n"
        "    def filter(self, doc):\n"
        '        assert doc.id != "7" or not Path("broken").exists()\n'
        "        return True\n"
    )
    (slurm / "broken").touch()
    write_table(slurm, TABLE.format('[[filter]]\ntype = "my_steps:Fails"'))
    # Programs that sbatch starts find the step, too
    monkeypatch.setenv("PYTHONPATH", str(slurm))
    data("filter")
    message = data("filter", code=1)
    assert "job 7 was queued, and 1 tasks of 1-filter are not complete; wait for it (squeue)" in message
    (slurm / "broken").unlink()
    assert data("filter", "--again")["queued"] == {"1-filter": 1}
    assert data("filter")["kept"] == 8


def test_options_are_those_of_datatroves_executor(slurm: Path, data: Command) -> None:
    write_table(slurm, TABLE.format('[[filter]]\ntype = "regex"\nregex_exp = "2"').replace("partition", "partitions"))
    message = data("filter", code=2)
    assert "slurm.partitions: unknown key; did you mean 'partition'?" in message
    assert not (slurm / "sbatch.log").exists()
    write_table(slurm, '[[filter]]\ntype = "regex"\nregex_exp = "2"')
    assert "--again: this table has no [slurm]" in data("filter", "--again", code=2)
