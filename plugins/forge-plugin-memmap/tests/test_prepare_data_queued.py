"""`data prepare --parts N --on CLUSTER.toml`, with stand-ins for SLURM's programs: what they are given is done here."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_testing.refusals import lacks

Prepare = Callable[..., str]
ForgeRun = Callable[..., tuple[int, str, str]]
# Jobs 17, 18, …; each task of an array, or the one job, becomes a line of `lines` by way of `srun`
SBATCH = """
[ -e full ] && [ "$(cat full)" = "$(basename "${@: -1}")" ] && { echo 'queue is full' >&2; exit 1; }
echo "$@" >> sbatch.log
tasks=$(sed -n 's/^#SBATCH --array=//p' "${@: -1}" | tr , '\\n' | sed 's/-/ /')
while read -r first last; do
    for task in $(seq ${first:-1} ${last:-${first:-0}}); do SLURM_ARRAY_TASK_ID=$task bash "${@: -1}"; done
done <<< "$tasks"
grep -q '^#SBATCH --array' "${@: -1}" || bash "${@: -1}"
echo $((16 + $(wc -l < sbatch.log)))
"""
SRUN = """printf '%s\\n' "$(printf '%q ' "$@")" >> lines"""
CLUSTER = """
[cluster]
nodes = 8
gpus_per_node = 8
cpus_per_task = 6
partition = "cpu"
time = "2:00:00"
setup = ["echo module >> modules"]
srun = ["--mpi=none"]
"""
ARGUMENTS = ("a.jsonl", "--held-out-every=4", "--shard-tokens=150")
QUEUED = (*ARGUMENTS, "--out=data", "--parts=5", "--on=cluster.toml")


@pytest.fixture(autouse=True)
def slurm(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus, a cluster file, and SLURM's programs."""
    Path("a.jsonl").write_text("\n".join(json.dumps({"text": f"document {number} " * 3}) for number in range(40)))
    Path("cluster.toml").write_text(CLUSTER)
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "squeue": "cat queue", "scancel": 'echo "$@" > gone'}.items():
        path = here / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    Path("queue").touch()
    monkeypatch.setenv("PATH", f"{here / 'bin'}:/usr/bin:/bin")


def lines(words: str = "--cpus-per-task=6 --mpi=none") -> list[list[str]]:
    """The arguments of `forge-run` that srun was given since the last call."""
    path = Path("lines")
    given = [shlex.split(line) for line in path.read_text().splitlines()] if path.exists() else []
    path.unlink(missing_ok=True)
    head = [*words.split(), sys.executable, "-m", "forge_core"]
    assert all(line[: len(head)] == head for line in given)
    return [line[len(head) :] for line in given]


def content(folder: str) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_what_is_queued_makes_the_bytes_of_one_command(prepare: Prepare, forge_run: ForgeRun) -> None:
    prepare(*ARGUMENTS, "--out=whole")
    out = prepare(*QUEUED)
    assert not lacks(out, "5 of 5 parts (1-5)", "job 17", "the join is job 18", "submit --status data-queue")
    *parts, join = lines()
    assert [line[-2:] for line in parts] == [["--part", f"{number}/5"] for number in range(1, 6)]
    assert not Path("data").exists()
    assert "--dependency=afterok:17 --kill-on-invalid-dep=yes" in Path("sbatch.log").read_text().splitlines()[1]
    for line in (*reversed(parts), join):
        assert forge_run(*line)[0] == 0
    assert content("data") == content("whole")
    assert Path("modules").read_text() == "module\n" * 6
    assert "data is finished, with all its parts" in prepare(*QUEUED)
    assert len(Path("sbatch.log").read_text().splitlines()) == 2


def test_a_part_takes_one_node_without_gpus(prepare: Prepare) -> None:
    script = prepare(*QUEUED, "--print", "--cluster.partition=big").partition("# queued with")[0]
    asked = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    log = f"output={Path.cwd()}/data-queue/slurm/%A_%a.log"
    one = [f"chdir={Path.cwd()}", "nodes=1", "ntasks-per-node=1", "cpus-per-task=6", "partition=big", "time=2:00:00"]
    assert asked == ["job-name=data-parts", log, "array=1-5", *one, "requeue", "open-mode=append"]
    assert not Path("data-queue").exists()
    assert not Path("sbatch.log").exists()


def test_what_is_finished_is_not_queued_again(prepare: Prepare, forge_run: ForgeRun) -> None:
    prepare(*ARGUMENTS, "--out=data", "--part=2/5")
    assert "4 of 5 parts (1,3-5)" in prepare(*QUEUED)
    *parts, join = lines()
    assert [line[-1] for line in parts] == ["1/5", "3/5", "4/5", "5/5"]
    for line in parts:
        forge_run(*line)
    # As after a join that was killed
    out = prepare(*QUEUED)
    assert lines() == [join]
    assert not lacks(out, "the join is job 19")
    assert not {"parts (", "after all"} & {*out.split()}
    assert "--dependency" not in Path("sbatch.log").read_text().splitlines()[-1]
    Path("data/parts/4-of-5/part.json").unlink()
    assert "1 of 5 parts (4)" in prepare(*QUEUED)


def test_jobs_in_the_queue_are_shown_ended_and_not_queued_twice(forge_run: ForgeRun, prepare: Prepare) -> None:
    prepare(*QUEUED)
    Path("queue").write_text("RUNNING|None|node1\nPENDING|Priority|\n")
    code, _, err = forge_run("data", "prepare", *QUEUED, "--tokenizer=./letters.py:Letters")
    assert code == 2
    assert not lacks(err, "job 17: RUNNING on node1, PENDING (Priority)", "submit --stop")
    _, out, _ = forge_run("submit", "--status", "data-queue", "--json")
    status = json.loads(out)
    assert (status["state"], status["job"]) == ("running", "17 18")
    Path("queue").write_text("COMPLETED||node1\nFAILED||node1\n")
    assert json.loads(forge_run("submit", "--status", "data-queue", "--json")[1])["state"] == "unknown"
    assert forge_run("submit", "--logs", "data-queue")[0] == 2
    assert forge_run("submit", "--stop", "data-queue")[0] == 0
    assert Path("gone").read_text() == "17 18\n"


@pytest.mark.parametrize("script", ["parts.sh", "join.sh"])
def test_where_slurm_takes_only_a_half_nothing_stays_queued(forge_run: ForgeRun, script: str) -> None:
    Path("full").write_text(script)
    code, _, err = forge_run("data", "prepare", *QUEUED, "--tokenizer=./letters.py:Letters")
    assert code == 2
    assert "SLURM took nothing: queue is full" in err
    assert Path("gone").exists() == (script == "join.sh")
    assert not [*Path("data-queue").rglob("*.sh")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--parts=5",), ("--on CLUSTER.toml",)),
        (("--on=cluster.toml",), ("--on", "--parts N")),
        (("--print",), ("--print", "--parts N")),
        (("--cluster.nodes=2",), ("--cluster.nodes=2", "--parts")),
        (("--parts=5", "--on=cluster.toml", "--json"), ("--json",)),
        (("--parts=5", "--on=none.toml"), ("none.toml",)),
        (("--parts=5", "--on=cluster.toml", "--cluster.partitions=x"), ("cluster.partitions", "'partition'")),
        (("--parts=4", "--on=cluster.toml"), ("parts of 3", "--parts 3")),
        (("--parts=5", "--part=1/5", "--on=cluster.toml"), ("--part", "not allowed with")),
        (("--parts=3", "--on=cluster.toml", "--held-out-every=5"), ("held_out_every: 4 then, 5 now",)),
    ],
)
def test_what_cannot_be_queued_is_refused(
    forge_run: ForgeRun, prepare: Prepare, words: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    prepare(*ARGUMENTS, "--out=data", "--part=1/3")
    code, _, err = forge_run("data", "prepare", *ARGUMENTS, "--out=data", "--tokenizer=./letters.py:Letters", *words)
    assert code == 2
    assert not lacks(err, *expected)
    assert not Path("sbatch.log").exists()


def test_a_tokenizer_that_is_to_be_trained_is_refused_before_anything_is_queued(forge_run: ForgeRun) -> None:
    words = ("--tokenizer=bpe", "--tokenizer.vocab_size=270")
    code, _, err = forge_run("data", "prepare", *QUEUED, *words)
    assert code == 2
    assert not lacks(err, "trained on all documents", "--tokenizer prepared")
    assert not Path("sbatch.log").exists()


def test_a_cluster_without_parts_is_refused_by_its_name(forge_run: ForgeRun) -> None:
    Path("own.py").write_text(
        "from __future__ import annotations\nfrom attrs import frozen\nfrom forge_plugin_launch import Cluster\n"
        '@frozen(kw_only=True)\nclass Own(Cluster):\n    """Of a stranger."""\n'
    )
    Path("cluster.toml").write_text('[cluster]\ntype = "./own.py:Own"\n')
    code, _, err = forge_run("data", "prepare", *QUEUED, "--tokenizer=./letters.py:Letters")
    assert code == 2
    assert not lacks(err, "own.py:Own", "--part 1/5 to 5/5", "--join")


def test_a_script_of_the_users_stays(forge_run: ForgeRun, prepare: Prepare) -> None:
    Path("data-queue/slurm").mkdir(parents=True)
    Path("data-queue/slurm/join.sh").write_text("mine")
    code, _, err = forge_run("data", "prepare", *QUEUED, "--tokenizer=./letters.py:Letters")
    assert (code, Path("data-queue/slurm/join.sh").read_text()) == (2, "mine")
    assert not lacks(err, "join.sh", "exists already")
    assert not Path("sbatch.log").exists()


def test_all_options_reach_the_parts_as_they_were_written(prepare: Prepare, forge_run: ForgeRun) -> None:
    Path("it's b.jsonl").write_text('{"body": "one"}\n')
    words = ("it's b.jsonl", "--field", "body", "--errors", "skip", "--out", "data")
    prepare("--parts", "2", *words, "--on", "cluster.toml", "--cluster.cpus_per_task=1")
    part, *_ = lines("--cpus-per-task=1 --mpi=none")
    assert part[: 2 + len(words)] == ["data", "prepare", *words]
    assert part[-2:] == ["--part", "1/2"]
