"""`forge-run init` as a user runs it: what it writes is right, trains, and says what every key does."""

from __future__ import annotations

import gzip
import json
import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from attrs import evolve

from forge_core import Trainer, load_job
from forge_plugin_plan.init.machine import product_speed
from forge_plugin_plan.init.sizes import Machine, Sizes
from forge_plugin_plan.init.trial import efficiency
from forge_testing.refusals import lacks, refuses

FAST = "--tflops=0.05"


def table(path: str = "job.toml"):
    return tomllib.loads(Path(path).read_text())


def test_own_text_becomes_a_job_that_trains_and_is_measured(books: Path, init) -> None:
    code, out, _ = init("--text", "books", "--time=60s", FAST)
    assert code == 0
    assert not lacks(out, "40 files", "0.1 MB", "40 documents", "forge-run data job.toml")
    job = load_job("job.toml", overrides=["train.steps=3", "scheduler.warmup_steps=1", "hooks={}"])
    summary = Trainer(job, echo=lambda text: None).run()
    assert summary.step == 3
    assert summary.evaluation["eval/bits_per_byte"] > 0


def test_every_key_has_a_comment_that_says_what_it_does(books: Path, init) -> None:
    assert init("--text", "books", FAST)[0] == 0
    lines = Path("job.toml").read_text().splitlines()
    keys = [(number, line) for number, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    assert len(keys) > 25
    assert [
        line for number, line in keys if "  # " not in line and " # " not in line and lines[number - 1][:1] != "#"
    ] == []
    assert max(map(len, lines)) <= 120


def test_the_head_of_the_job_says_how_sizes_were_chosen(books: Path, init) -> None:
    init("--text", "books", "--time=2m", FAST)
    head = Path("job.toml").read_text().partition("[job]")[0]
    for words in ("0.05 TFLOP/s of bf16 matrix products (as given)", "2 minutes", "Hoffmann et al. 2022", "Step Law"):
        assert words in " ".join(head.replace("#", "").split())


def test_nothing_is_overwritten(books: Path, init) -> None:
    Path("job.toml").write_text("mine")
    code, _, err = init("--text", "books", FAST)
    assert code == 2
    assert not lacks(err, "job.toml", "exists")
    assert Path("job.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        ([], ["--text FOLDER"]),
        (["--yes"], ["nothing"]),
        (["--text", "books", "--stdlib"], ["--text", "--stdlib"]),
        (["--text", "nowhere"], ["'nowhere'", "exist"]),
        (["--text", "empty"], ["'empty'", "no data"]),
        (["--tokens", "books"], ["manifest.json", "data prepare"]),
        (["--text", "books", "--messages=m"], ["--messages", "--dataset"]),
        (["--dataset=x/y", "--messages=m"], ["chat template"]),
        (["--text", "books", "--from=books"], ["start.toml"]),
        (["--text", "books", "--parameters=1M", "--from=books"], ["--from", "size"]),
        (["--text", "books", "--memory=8"], ["--memory", "--tflops"]),
        (["nowhere/job.toml", "--text", "books"], ["no folder", "nowhere"]),
        (["--text", "books", "--time=30"], ["'30'", "90s"]),
        (["--text", "books", "--parameters=big"], ["'big'", "300k"]),
        (["--text", "books", "--tflops=0"], ["--tflops", "above 0"]),
        (["--text", "books", "--tflops=inf"], ["--tflops", "above 0"]),
        (["--text", "books", FAST, "--memory=nan"], ["--memory", "above 0"]),
        (["--text", "blank.jsonl"], ["blank.jsonl", "no text"]),
        (["--dataset=rows.odd"], ["rows.odd", ".jsonl", ".parquet"]),
    ],
)
def test_what_cannot_work_is_refused_by_name_and_nothing_is_written(argv, facts, here: Path, books: Path, init) -> None:
    (here / "empty").mkdir()
    (here / "blank.jsonl").write_text('{"text": ""}')
    (here / "rows.odd").touch()
    before = sorted(here.iterdir())
    code, _, err = init(*argv)
    assert code == 2
    assert not lacks(err, *facts)
    assert sorted(here.iterdir()) == before


def test_a_job_that_does_not_pass_the_check_is_not_written(books: Path, init, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_plugin_plan.init.sizes.rate", lambda count, tokens: -1.0)
    code, _, err = init("--text", "books", FAST)
    assert code == 2
    assert not lacks(err, "optimizer.lr", "> 0")
    assert not Path("job.toml").exists()


# --- data --------------------------------------------------------------------------------------------------------


def test_formats_that_are_left_out_are_counted(books: Path, init, sentences) -> None:
    (books / "a.pdf").write_bytes(b"%PDF")
    (books / "b.pdf").write_bytes(b"%PDF")
    (books / "c.html").write_text("<p>")
    with gzip.open(books / "z.md.gz", "wt") as file:
        file.write(sentences(1, 50))
    out = init("--text", "books", FAST)[1]
    assert "41 files" in out
    assert not lacks(out, "3 files", ".pdf 2", ".html 1")


def test_text_that_is_not_utf8_is_read_with_replacements_and_the_job_says_so(books: Path, init) -> None:
    (books / "latin.txt").write_bytes("déjà vu and so on".encode("latin-1"))
    code, out, _ = init("--text", "books", FAST)
    assert code == 0
    assert table()["data"]["sources"][0]["errors"] == "replace"
    assert not lacks(out, "UTF-8", "latin.txt")


def test_a_single_document_is_not_split(here: Path, init, sentences) -> None:
    (here / "book.txt").write_text(sentences(3, 3000))
    code, _, _ = init("--text", "book.txt", FAST)
    assert code == 0
    assert table()["data"]["sources"][0]["held_out_every"] == 0
    assert not lacks(Path("job.toml").read_text(), "single document")


def test_the_share_that_is_held_out_is_near_a_twentieth_of_the_text(books: Path, init, sentences) -> None:
    assert init("--text", "books", FAST)[0] == 0
    assert table()["data"]["sources"][0]["held_out_every"] == 20
    (books / "00.txt").write_text(sentences(0, 9000))  # the first, which every n-th begins with, is most of the text
    assert init("other.toml", "--text", "books", FAST)[0] == 0
    assert table("other.toml")["data"]["sources"][0]["held_out_every"] == 0
    assert not lacks(Path("other.toml").read_text(), "unequal")


def test_json_lines_have_the_field_that_is_named(here: Path, init, sentences) -> None:
    rows = [json.dumps({"body": sentences(n, 100)}) for n in range(100)]
    (here / "rows.jsonl").write_text("\n".join(rows))
    code, _, err = init("--text", "rows.jsonl", FAST)
    assert code == 2
    assert "no key 'text', but 'body'" in err
    assert init("--text", "rows.jsonl", "--field=body", FAST)[0] == 0
    source = table()["data"]["sources"][0]
    assert (source["field"], source["held_out_every"]) == ("body", 20)


def test_the_beginning_of_a_large_corpus_stands_for_all_of_it(books: Path, chosen, monkeypatch) -> None:
    whole = chosen("--text", "books")["data"]
    monkeypatch.setattr("forge_plugin_plan.init.corpora.READ", 10_000)
    part = chosen("part.toml", "--text", "books")["data"]
    assert part["bytes"] == pytest.approx(whole["bytes"], rel=0.05)
    assert "about" in part["remarks"][0]
    assert "about" not in whole["remarks"][0]


def test_prepared_tokens_bring_their_tokenizer(books: Path, chosen) -> None:
    pytest.importorskip("forge_plugin_memmap")
    from forge_core.cli import main

    assert main(["data", "prepare", "books", "--out=prepared", "--tokenizer=bytes", "--workers=1"]) == 0
    found = chosen("--tokens", "prepared", "--time=60s")
    manifest = json.loads(Path("prepared/manifest.json").read_text())
    assert (found["data"]["tokens"], found["vocab_size"]) == (manifest["splits"]["train"]["tokens"], 257)
    assert table()["data"]["tokenizer"] == {"type": "prepared", "path": "prepared"}


def test_a_hugging_face_dataset_on_disk(here: Path, books: Path, chosen, sentences) -> None:
    pytest.importorskip("forge_plugin_huggingface")
    (here / "data").mkdir()
    (here / "data" / "rows.jsonl").write_text(json.dumps({"text": sentences(1, 50)}))
    found = chosen("--dataset", "data")
    assert (found["data"]["bytes"], found["sizes"]["epochs"]) == (None, None)
    assert table()["data"]["tokenizer"]["max_bytes"] == 100_000_000


def test_a_file_of_chats_is_packed_whole_and_needs_a_tokenizer_with_a_template(here: Path, chosen) -> None:
    pytest.importorskip("forge_plugin_huggingface")
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    (here / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    found = chosen("--dataset=chats.jsonl", "--messages=messages", "--tokenizer=owner/name")
    assert found["name"] == "chats"
    source = table()["data"]["sources"][0]
    assert (source["path"], source["data_files"], source["messages"]) == ("json", "chats.jsonl", "messages")
    assert table()["data"]["packing"]["type"] == "best_fit"
    assert "hooks" not in table()


def test_several_texts_are_a_list(books: Path, here: Path, init, sentences) -> None:
    (here / "more.md").write_text(sentences(9, 300))
    assert init("--text=books", "--text=more.md", "job.toml", FAST)[0] == 0
    assert table()["data"]["sources"][0]["path"] == ["books", "more.md"]


def test_training_goes_on_from_an_imported_model(here: Path, books: Path, chosen) -> None:
    first = load_job(_first_job(here))
    Trainer(first, echo=lambda text: None).run()
    (here / "runs/first/start.toml").write_text(
        MODEL + '[checkpoint.load]\npath = "runs/first"\n[data.tokenizer]\ntype = "bytes"\n'
    )
    found = chosen("tune.toml", "--from=runs/first", "--text", "books", "--time=60s")
    assert found["sizes"]["parameters"] == 257 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32 + 257 * 32
    assert found["start"] == "runs/first/start.toml"
    written = table("tune.toml")
    assert "model" not in written
    assert "tokenizer" not in written["data"]
    job = load_job(found["start"], "tune.toml", overrides=["train.steps=2", "scheduler.warmup_steps=1", "hooks={}"])
    assert Trainer(job, echo=lambda text: None).run().step == 2


MODEL = """
[model]
type = "transformer"
dim = 32
layers = 2
[model.attention]
heads = 2
[model.ffn]
hidden = 64
"""


def _first_job(here: Path) -> str:
    train = '[job]\nname = "first"\n[train]\nsteps = 1\nglobal_batch_size = 2\nseq_len = 16\n'
    data = '[data.tokenizer]\ntype = "bytes"\n[[data.sources]]\ntype = "text"\npath = "books"\n'
    (here / "first.toml").write_text(f'{train}{MODEL}{data}[optimizer]\ntype = "adamw"\n')
    return "first.toml"


def test_a_run_has_a_folder_of_its_own(here: Path, books: Path, chosen) -> None:
    (here / "runs" / "books").mkdir(parents=True)
    assert chosen("--text", "books")["name"] == "books-2"
    assert chosen("named.toml", "--text", "books", "--name=mine")["name"] == "mine"


# --- machine and terminal ----------------------------------------------------------------------------------------


def test_this_machine_is_measured(books: Path, init) -> None:
    code, out, err = init("--text", "books", "--time=60s", "--no-trial", "--json")
    assert code == 0, err
    machine = json.loads(out)["machine"]
    assert machine["measured"] is True
    assert 1e8 < machine["flops"] < 1e16
    assert machine["precision"] in ("bf16", "fp32")
    assert machine["memory"] > 10**8


@pytest.mark.parametrize(("seconds", "rows"), [(0.0014, {128}), (0.001, {128, 2048})])
def test_a_dtype_that_is_slow_is_measured_by_few_rows(
    seconds: float, rows: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All would take 16 times as long, which is more than twice the time of a measurement, or less."""
    seen = set()
    monkeypatch.setattr("forge_plugin_plan.init.machine._seconds", lambda a, b: seen.add(len(a)) or seconds)
    monkeypatch.setattr("forge_plugin_plan.init.machine.SECONDS", 0.01)
    speed = product_speed(torch.float32, torch.device("cpu"))
    assert seen == rows
    assert speed == max(rows) * 2 * 512 * 2048 / seconds


def test_on_a_terminal_it_asks_and_tries_some_steps(here: Path, books: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "forge_core", "init"]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=subprocess.PIPE, close_fds=True)
    os.close(follower)
    os.write(leader, b"1\nnowhere\nbooks\nsoon\n90s\n")
    shown = b""
    while process.poll() is None or b"forge-run job.toml" not in shown:
        try:
            shown += os.read(leader, 4096)
        except OSError:
            break
    os.close(leader)
    assert process.wait(120) == 0, (shown, process.stderr.read() if process.stderr else b"")
    text = shown.decode()
    assert not lacks(text, "nowhere", "'soon'")
    head = " ".join(Path("job.toml").read_text().replace("#", "").split())
    assert "budget 1.5 minutes" in head
    assert not lacks(head, "measured")
    assert {path.name for path in here.iterdir()} == {"books", "job.toml"}  # of the trial, nothing is left
    assert table()["data"]["sources"][0]["path"] == "books"


SIZES = Sizes(
    layers=3,
    dim=96,
    parameters=1000,
    seq_len=16,
    global_batch_size=2,
    micro_batch_size=0,
    steps=10,
    lr=1e-3,
    warmup_steps=1,
    seconds=1.0,
    epochs=None,
)
MACHINE = Machine(name="this", flops=1e11, precision="fp32")


def test_a_training_that_does_not_run_here_is_refused_with_its_error(here: Path) -> None:
    wrong = evolve(SIZES, dim=100)  # three heads do not divide it
    with refuses("", "model.attention.heads", 3, 100):
        efficiency(wrong, 300, MACHINE)


@pytest.mark.parametrize(("micro_batch_size", "rows"), [(0, 2), (1, 1)])
def test_the_efficiency_is_the_work_of_a_step_by_its_time_and_the_speed(monkeypatch, micro_batch_size, rows) -> None:
    monkeypatch.setattr("forge_plugin_plan.init.trial._step_seconds", lambda job, folder: 0.004)
    sizes = evolve(SIZES, micro_batch_size=micro_batch_size)
    flops = rows * 16 * (6 * 1000 + 6 * 3 * 96 * 16)  # of weights, and of attention to half of the positions
    assert efficiency(sizes, 300, MACHINE) == pytest.approx(flops / (0.004 * 1e11))


def test_help_is_instant_and_ends_with_examples() -> None:
    code = "import sys; from forge_core.cli import main\ntry: main(['init', '--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'rich', 'forge_plugin_text'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "forge-run init --text ~/books --time 30m" in done.stdout
