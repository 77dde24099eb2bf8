"""The data path as a whole, by the commands that a user has, on texts that a Debian machine has anyway.

    python tests/benchmarks/data_path.py FOLDER [--megabytes 2]

Three corpora: the standard library of the running Python, manual pages, and what packages put into /usr/share/doc.
Each is filtered, deduplicated and decontaminated (`forge-run data filter`, `dedup`, `decontaminate`), and tokenised in
three parts by an array on a SLURM cluster of two nodes on loopback, with a dependent job that joins them
(`data prepare --parts`). Twelve
proxies decide the mixture that is best for held-out Python (`data mix`), a run trains on it, another one on the natural
mixture, and `data --documents` goes from the tokens of one step back to the files of this machine, which are read and
compared. Two processes at most work at the same time.

Needs man-db, slurm-wlm and munge, and the plugins datatrove, memmap, ladder, plan and runs. A step that is complete
is not run again, so the same command continues one that was interrupted; FOLDER/figures.json has seconds and figures.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "plugins/forge-plugin-launch/tests/slurm"))

from slurm_cluster import SlurmCluster, missing  # noqa: E402  (of a plugin's tests, which are no package)

STDLIB, SHARE = Path(sysconfig.get_path("stdlib")), Path("/usr/share")
MANUALS = SHARE / "man"
CORPORA = {"python": STDLIB, "manuals": MANUALS, "docs": SHARE}
"""Corpora, and where the names of their files start."""
STAGES = ("filter", "dedup", "decontaminate")
PARTS, PROXIES, STEPS = 3, 12, 1000
"""Of the run: more tokens than Python has, so that `max_epochs` limits its share."""
LONGEST = 200_000
"""Bytes of a document; a few files of changes and tables would be most of a corpus of two megabytes."""

# Sources have few stop words and many operators; /usr/share/doc has lists of file names and of people
QUALITY = {
    "python": "min_doc_words = 50\nmin_stop_words = 0\nmax_non_alpha_words_ratio = 0.4\nmax_symbol_word_ratio = 0.3",
    "manuals": "min_doc_words = 50\nmax_non_alpha_words_ratio = 0.6",
    "docs": "min_doc_words = 50\nmax_non_alpha_words_ratio = 0.6",
}
TABLE = """\
inputs = ["corpus/{name}.jsonl"]
output = "clean/{name}"
tasks = 2
workers = 1

[[filter]]
type = "gopher_quality"
{quality}

[dedup]
type = "minhash"

[decontaminate]
n_grams = 12

[[decontaminate.tasks]]
type = "file"
path = "{name}-quiz.jsonl"
"""
JOB = """\
[job]
name = "proxy"

[train]
steps = 60
global_batch_size = 8
seq_len = 128
precision = "fp32"

[model]
type = "transformer"
dim = 32
layers = 2
attention = { heads = 4 }

[optimizer]
type = "adamw"
lr = 5e-3

[evaluations.held_out]
sequences = 128

[data.tokenizer]
type = "prepared"
path = "tokenizer"
"""
SOURCE = """
[[data.sources]]
type = "memmap"
name = "{name}"
path = "data/{name}"
max_epochs = 1
"""
MIX = """\
job = "job.toml"
output = "mixtures"
runs = {runs}
tokens = {tokens}

[natural]
{natural}
"""


def text_of(path: Path) -> str:
    """Returns the text of a file, as the corpus has it: manual pages are set by man."""
    if MANUALS in path.parents:
        environment = os.environ | {"MANWIDTH": "100", "LC_ALL": "C.UTF-8"}
        command = ("man", "--no-hyphenation", "--no-justification", str(path))
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def files_of(corpus: str) -> Iterator[Path]:
    """Yields the files of a corpus in an order that only their names decide."""
    if corpus == "python":
        found = [path for path in STDLIB.rglob("*.py") if "-packages" not in str(path)]
    elif corpus == "manuals":
        found = list(MANUALS.glob("man[1578]/*.gz"))
    else:
        names = re.compile(r"copyright|README.*|NEWS(\.gz)?|.*\.(txt|md|rst)(\.gz)?")
        found = [path for path in (SHARE / "doc").rglob("*") if names.fullmatch(path.name)]
        found += (SHARE / "common-licenses").iterdir()
    # Links would be copies that no package wrote
    found = sorted(path for path in found if path.is_file() and not path.is_symlink())
    random.Random(0).shuffle(found)
    # One package may have written nine of ten manual pages, on its subcommands
    pages = Counter[str]()
    for path in found:
        program = re.split(r"[-_.]", path.name)[0] if corpus == "manuals" else str(path)
        pages[program] += 1
        if pages[program] <= 10:
            yield path


def documents_of(corpus: str, size: int) -> Iterator[dict[str, Any]]:
    """Yields documents of about `size` bytes together, with an id, and the file as their origin."""
    taken = 0
    for path in files_of(corpus):
        if taken >= size:
            return
        try:
            text = text_of(path)
        except UnicodeDecodeError:  # tests of the standard library have other encodings on purpose
            continue
        if text.strip() and len(text) <= LONGEST:
            taken += len(text)
            yield {"id": f"{corpus}:{path.relative_to(CORPORA[corpus])}", "origin": {"file": str(path)}, "text": text}


class DataPath:
    """The steps, each of which is run once."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.record = folder / "figures.json"
        self.figures: dict[str, Any] = json.loads(self.record.read_text()) if self.record.exists() else {}
        self.environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def once(self, name: str, step: Callable[[], Any]) -> Any:
        """Returns the figures of a step, which is run if they are not recorded yet."""
        if name not in self.figures:
            began = time.monotonic()
            print(f"== {name}", flush=True)
            found = step()
            self.figures[name] = {"seconds": round(time.monotonic() - began, 1), "figures": found}
            self.record.write_text(json.dumps(self.figures, indent=1))
        return self.figures[name]["figures"]

    def forge_run(self, *arguments: str) -> str:
        """Returns what a command prints."""
        print("$ forge-run", *arguments, flush=True)
        command = ("forge-run", *arguments)
        done = subprocess.run(command, cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE)
        if done.returncode:
            sys.exit(f"{done.stdout}\nforge-run {' '.join(arguments)}: exit code {done.returncode}")
        return done.stdout

    def read(self, name: str) -> list[dict[str, Any]]:
        """Returns lines of JSON of a file, or of all files of a folder."""
        place = self.folder / name
        files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def write(self, name: str, content: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    # --- documents -----------------------------------------------------------------------------------------------

    def corpus(self, name: str) -> dict[str, int]:
        documents = list(documents_of(name, self.size))
        self.write(f"corpus/{name}.jsonl", "".join(f"{json.dumps(each)}\n" for each in documents))
        self.write(f"{name}.toml", TABLE.format(name=name, quality=QUALITY[name]))
        return {"documents": len(documents), "bytes": (self.folder / f"corpus/{name}.jsonl").stat().st_size}

    def clean(self, name: str, stage: str) -> dict[str, Any]:
        if stage == "decontaminate":
            self.quiz(name)
        summary = json.loads(self.forge_run("data", stage, f"{name}.toml", "--json"))
        kept = {key: summary[key] for key in ("documents", "kept")}
        return kept | {"reasons": [step["reasons"] for step in summary["steps"]]}

    def quiz(self, name: str) -> None:
        """Writes a task with passages of three documents that are left, and one item that nothing contains."""
        items = [{"context": "Which sentence is in no file?", "choices": [" " + "no such words at all " * 5, " None."]}]
        for document in self.read(f"clean/{name}/dedup/documents")[10:40:10]:
            # From its middle, as manual pages of one package begin with the same sentences
            words = document["text"].split()
            words = words[len(words) // 2 :][:20]
            items.append({"context": f"What does {document['id']} contain?", "choices": [" " + " ".join(words), " no"]})
        self.write(f"{name}-quiz.jsonl", "".join(json.dumps(each | {"answer": 0}) + "\n" for each in items))

    # --- tokens --------------------------------------------------------------------------------------------------

    def tokenizer(self) -> None:
        inputs = [f"clean/{name}/decontaminate/documents" for name in CORPORA]
        options = ("--tokenizer", "bpe", "--tokenizer.vocab_size=1024", "--workers", "1")
        self.forge_run("data", "prepare", *inputs, "--out", "tokenizer", *options)

    def tokens(self) -> dict[str, Any]:
        """Queues an array of parts and a join of each corpus, and waits for the last join."""
        if reason := missing():
            sys.exit(reason)
        self.write("slurm.toml", "[cluster]\ncpus_per_task = 1\n")
        manifests = {name: self.folder / f"data/{name}/manifest.json" for name in CORPORA}
        # Not in FOLDER, as the path of munge's socket must be short. It stays, with the logs of SLURM
        cluster = SlurmCluster(Path(tempfile.mkdtemp(prefix="slurm-")), nodes=2, cpus=1)
        try:
            cluster.start()
            jobs = [self.queue(cluster, name) for name, path in manifests.items() if not path.exists()]
            cluster.until(lambda: not cluster.run("squeue", "--noheader"), "all jobs have ended", 900)
            facts = [cluster.facts(job) for array, join in jobs for job in (f"{array}_1", f"{array}_2", join)]
        finally:
            cluster.stop()
        if any(each.get("JobState") != "COMPLETED" for each in facts):
            sys.exit(f"jobs ended as {facts}; see {self.folder}/data/*-queue/slurm")
        splits = {name: json.loads(path.read_text())["splits"] for name, path in manifests.items()}
        return {"splits": splits, "nodes": sorted({each["NodeList"] for each in facts})}

    def prepare(self, name: str) -> tuple[str, ...]:
        """Returns the arguments of `forge-run data prepare` but for the output."""
        # Only Python is evaluated, so that the mixture is the best one for it
        held_out = ("--held-out-every", "10") if name == "python" else ()
        tokenizer = ("--tokenizer", "prepared", "--tokenizer.path=tokenizer")
        return ("data", "prepare", f"clean/{name}/decontaminate/documents", *tokenizer, *held_out)

    def queue(self, cluster: SlurmCluster, name: str) -> tuple[str, str]:
        """Returns the numbers of the array and of the join."""
        options = ("--out", f"data/{name}", "--parts", str(PARTS), "--on", "slurm.toml")
        print(cluster.run("forge-run", *self.prepare(name), *options, cwd=self.folder), flush=True)
        jobs = json.loads((self.folder / f"data/{name}-queue/slurm/jobs.json").read_text())
        return jobs["parts"], jobs["join"]

    def compare(self) -> None:
        """Compare the joined parts of a corpus with one command that has no parts."""
        if not (self.folder / "whole/manifest.json").exists():
            self.forge_run(*self.prepare("python"), "--out", "whole", "--workers", "1")
        subprocess.run(("diff", "--recursive", "data/python", "whole"), cwd=self.folder, check=True)

    # --- mixture, run and report ---------------------------------------------------------------------------------

    def plan(self) -> None:
        natural = "\n".join(f"{name} = {count}" for name, count in self.natural().items())
        self.write("job.toml", JOB + "".join(SOURCE.format(name=name) for name in CORPORA))
        self.write("mix.toml", MIX.format(runs=PROXIES, tokens=STEPS * 1024, natural=natural))
        print(self.forge_run("data", "mix", "plan", "mix.toml"))

    def fit(self) -> dict[str, Any]:
        print(self.forge_run("data", "mix", "fit", "mix.toml"))
        return json.loads(self.forge_run("data", "mix", "fit", "mix.toml", "--json"))

    def train(self, name: str, *options: str) -> float:
        """Returns the held-out loss at the end of a run."""
        self.forge_run("mixed.toml", f"--train.steps={STEPS}", f"--job.name={name}", *options)
        return json.loads(self.forge_run("show", f"runs/{name}", "--json"))["held_out_loss"]

    def natural(self) -> dict[str, int]:
        splits = self.figures["tokens"]["figures"]["splits"]
        return {name: splits[name]["train"]["tokens"] for name in CORPORA}

    def trace(self, name: str) -> dict[str, int]:
        """Reads the file of each document of a step, and looks for the step's text in it."""
        numbers = [option for number in range(8) for option in ("--sample", str(number))]
        options = ("--step", str(STEPS // 2), *numbers, "--tokens", "0", "--documents", "--json")
        view = json.loads(self.forge_run("data", f"runs/{name}/job.toml", *options))
        counts = dict.fromkeys(("documents", "tokens", "characters", *CORPORA), 0)
        for sample in view["samples"]:
            for number, document in enumerate(sample["documents"]):
                texts = [run["text"] for run in sample["runs"] if run["document"] == number and run["kind"] == "text"]
                # A character that a sample cuts is no character
                text = "".join(texts).removesuffix("<end of text>").strip("\ufffd")
                file = self.traced(document["origin"])
                if text not in text_of(file):
                    sys.exit(f"{file} does not have the text of {document}: {text!r}")
                counts["documents"] += 1
                counts["tokens"] += document["tokens"]
                counts["characters"] += len(text)
                counts[sample["source"]] += 1
                print(f"{document['tokens']} tokens from token {document['from_token']} of {file}")
        return counts

    def traced(self, place: dict[str, Any]) -> Path:
        """Returns the file that a document comes from; the line that was tokenised has the same id and origin."""
        line, kept = self.read(place["file"])[place["line"] - 1], place["kept"]
        origin = json.loads(kept["origin"])
        if (line["id"], line["origin"]) != (kept["id"], origin):
            sys.exit(f"{place['file']}:{place['line']} is {line['id']}, {line['origin']}, and the shard has {kept}")
        return Path(origin["file"])

    def report(self) -> list[str]:
        """Returns the lines of the report's section on contamination, and shows why one document was removed."""
        removed = self.read("clean/python/decontaminate/removed")[0]["id"]
        print(self.forge_run("data", "filter", "python.toml", "--why", removed))
        self.forge_run("report", "runs/mixed", "--out", "report.md", "--sections", "contamination")
        lines = (self.folder / "report.md").read_text().splitlines()
        found = [line for line in lines if any(f"| {name}-quiz |" in line for name in CORPORA)]
        if len(found) != len(CORPORA):
            sys.exit(f"{self.folder / 'report.md'} does not have the tasks of {', '.join(CORPORA)}")
        return found


def main() -> None:
    """Run the steps that are not complete, and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=float, default=2, help="of each corpus (2)")
    options = parser.parse_args()
    # So that the cluster is stopped, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the same command continues"))
    options.folder.mkdir(parents=True, exist_ok=True)
    path = DataPath(options.folder.resolve(), int(options.megabytes * 1e6))
    for name in CORPORA:
        path.once(f"corpus {name}", lambda name=name: path.corpus(name))
        for stage in STAGES:
            path.once(f"{stage} {name}", lambda name=name, stage=stage: path.clean(name, stage))
    path.once("tokenizer", path.tokenizer)
    path.once("tokens", path.tokens)
    path.once("tokens by one command", path.compare)
    path.once("mix plan", path.plan)
    path.once("mix run", lambda: path.forge_run("data", "mix", "run", "mix.toml").splitlines()[-1])
    path.once("mix fit", path.fit)
    path.once("mix write", lambda: path.forge_run("data", "mix", "write", "mix.toml", "--out", "mixed.toml"))
    path.once("train", lambda: path.train("mixed"))
    weights = [f"--data.sources.{number}.weight={count}" for number, count in enumerate(path.natural().values())]
    path.once("train natural", lambda: path.train("natural", *weights))
    for name in ("mixed", "natural"):
        path.once(f"trace {name}", lambda name=name: path.trace(name))
    path.once("report", path.report)
    print(json.dumps(path.figures, indent=1))


if __name__ == "__main__":
    main()
