"""The script of docs/how-to/slurm.md, with stand-ins for srun and scontrol: SLURM itself is on few machines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forge_testing.processes import HANG_S

PAGE = Path(__file__).parents[2] / "docs/how-to/slurm.md"
HOOK = """
import os, signal
from pathlib import Path
from forge_core import TrainingHook

class Notice(TrainingHook):
    def on_step_begin(self, context):
        if context.step == 2 and not Path("given").exists():
            Path("given").touch()
            os.kill(os.getpid(), signal.SIGUSR1)  # as --signal does
"""
SRUN = f"""#!/bin/bash
echo "srun $*" >> calls
while [ "$1" != forge-run ]; do shift; done
shift
exec {sys.executable} -m forge_core "$@" --train.steps=3 --hooks.notice.type=./hook.py:Notice
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for title in ("job.toml", "long.sh"):
        [text] = re.findall(rf'title="{title}"\n(.*?)```', PAGE.read_text(), re.DOTALL)
        (tmp_path / title).write_text(text)
    (tmp_path / "hook.py").write_text(HOOK)
    for name, text in {"srun": SRUN, "scontrol": '#!/bin/bash\necho "scontrol $*" >> calls\n'}.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def test_a_run_that_is_told_to_stop_is_queued_again_and_goes_on_to_its_end(folder: Path) -> None:
    variables = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "12", "FORGE_CACHE": "cache", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **variables, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def submitted() -> tuple[int, str]:
        command = ["bash", "long.sh"]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
        )
        return done.returncode, done.stdout

    srun = "srun --cpus-per-task=12 --kill-on-bad-exit=1 forge-run job.toml"
    code, out = submitted()
    assert (code, (folder / "calls").read_text().splitlines()) == (75, [srun, "scontrol requeue 7"])
    assert "stopped at step 2 (signal SIGUSR1), everything saved" in out
    code, out = submitted()
    assert (code, (folder / "calls").read_text().splitlines()) == (0, [srun, "scontrol requeue 7", srun])
    assert "continuing from runs/long/checkpoints/step-2, step 2" in out
    assert "finished at step 3" in out
