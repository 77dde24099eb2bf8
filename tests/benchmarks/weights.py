"""Wall time, CPU time and memory of bringing a published model in and taking it out, beside `transformers`.

    python tests/benchmarks/weights.py [--gigabytes 1] [--rounds 5]

A Llama of random weights in bfloat16, on both sides; what is read comes from the disk (files are taken out of the page
cache before each measurement), and what is written is flushed to it. Each line is beside its peer:

- in: `import_folder`, which links the files and hashes every byte, beside `from_pretrained` with every page touched,
  since it maps the files; also an import after which every tensor is read into memory;
- out, from a checkpoint on the disk: `export_run` beside `from_pretrained` and `save_pretrained` in one go;
- out, from memory, as the hook `export` does: beside `save_pretrained` of a model in memory;
- commands by the user's clock: start of Python, imports of libraries and the tokenizer (none here) included.

Each figure is that of processes of their own, in turns; ratios are of medians over them, and of the least, which other
work on the machine disturbs less. Except in the commands, what a first call costs is not counted, such as imports of
libraries, and pages that a virtual machine has to get from its host: each process does the same with a tiny model
before, and then three times, of which the quickest counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PEERS = {
    "import": "from_pretrained",
    "import, read": "from_pretrained",
    "export": "from_pretrained, save_pretrained",
    "export from memory": "save_pretrained",
    "command import": "command from_pretrained",
    "command export": "command from_pretrained, save_pretrained",
}
"""What is ours, and the peer of each."""
REPEATS = 3
LOAD = (
    "import sys, torch; from transformers import AutoModelForCausalLM as Auto; "
    "model = Auto.from_pretrained(sys.argv[1]); "
    "[p.detach().view(-1).view(torch.uint8)[::4096].sum() for p in model.parameters()]"
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="lines to measure: those whose name has this in it, and their peers")
    parser.add_argument("--action", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def write_model(folder: Path, gigabytes: float, dim: int = 1024) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    of_layer = 4 * dim**2 + 3 * dim * 4 * dim
    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * 32_000 * dim) / of_layer))
    config = LlamaConfig(
        hidden_size=dim, intermediate_size=4 * dim, num_hidden_layers=layers, num_attention_heads=16, vocab_size=32_000
    )
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="500MB")


def forget(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def measure(action: str, folder: Path) -> None:
    """Print time and memory of an action, which begins when the libraries are loaded."""
    published, run, out = folder / "published", folder / "run", folder / "out"
    tiny = folder / "tiny"
    for name in ("run", "out"):
        shutil.rmtree(tiny / name, ignore_errors=True)
    PREPARATIONS[action](tiny / "published", tiny / "run", tiny / "out")()
    prepared = PREPARATIONS[action](published, run, out)
    times = []
    for _ in range(REPEATS):
        shutil.rmtree(out, ignore_errors=True)
        if action.startswith("import"):
            shutil.rmtree(run, ignore_errors=True)
        gc.collect()  # pages that a model of before still maps would stay in memory
        forget(folder)
        began, cpu = time.perf_counter(), time.process_time()
        prepared()
        flush(out) if out.exists() else None
        times.append((time.perf_counter() - began, time.process_time() - cpu))
    seconds, cpu = map(min, zip(*times, strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak_mb": peak}))


def importing(published: Path, run: Path, _out: Path) -> Callable[[], Any]:
    from forge_plugin_weights.importing import import_folder

    return lambda: import_folder(published, run, tokenizer=False)


def importing_and_reading(published: Path, run: Path, _out: Path) -> Callable[[], Any]:
    from forge_kit.tools.checkpoints import stored_tensors
    from forge_kit.tools.whole_tensors import read_whole
    from forge_plugin_weights.importing import import_folder

    def both() -> None:
        import_folder(published, run, tokenizer=False)
        checkpoint = run / "checkpoints/step-0"
        stored = stored_tensors(checkpoint)
        read_whole(checkpoint, stored, stored)

    return both


def exporting(published: Path, run: Path, out: Path) -> Callable[[], Any]:
    from forge_plugin_weights.exporting import export_run
    from forge_plugin_weights.importing import import_folder

    import_folder(published, run, tokenizer=False)
    return lambda: export_run(run, out)


def exporting_from_memory(published: Path, run: Path, out: Path) -> Callable[[], Any]:
    import torch

    from forge_core.checkpoint.resume import locate
    from forge_core.config.load import parse_job
    from forge_core.engine.build import build_context, build_model
    from forge_core.plugins.catalog import Catalog
    from forge_kit.tools.checkpoints import load_model
    from forge_plugin_weights.importing import import_folder
    from forge_plugin_weights.parallel_export import export_training

    import_folder(published, run, tokenizer=False)
    catalog = Catalog.installed()
    checkpoint, manifest = locate(run, "sizes")
    job = parse_job(manifest["job"], "manifest.json", catalog)
    model = build_model(job, build_context(job, catalog, run)).model
    load_model(checkpoint, model)
    context: Any = SimpleNamespace(job=job, folder=run, model=model.to(torch.bfloat16), optimizer=None, step=0)
    return lambda: export_training(context, out, None, 5 * 10**9, "", verify=True)


def loading(published: Path, _run: Path, _out: Path) -> Callable[[], Any]:
    import torch
    from transformers import LlamaForCausalLM

    def load() -> Any:
        model = LlamaForCausalLM.from_pretrained(published)
        for parameter in model.parameters():  # it maps the files: a byte of each page brings them in
            parameter.detach().view(-1).view(torch.uint8)[::4096].sum()
        return model

    return load


def loading_and_saving(published: Path, run: Path, out: Path) -> Callable[[], Any]:
    load = loading(published, run, out)
    return lambda: load().save_pretrained(out, max_shard_size="5GB")


def saving(published: Path, run: Path, out: Path) -> Callable[[], Any]:
    model = loading(published, run, out)()
    return lambda: model.save_pretrained(out, max_shard_size="5GB")


PREPARATIONS: dict[str, Callable[[Path, Path, Path], Callable[[], Any]]] = {
    "import": importing,
    "import, read": importing_and_reading,
    "export": exporting,
    "export from memory": exporting_from_memory,
    "from_pretrained": loading,
    "from_pretrained, save_pretrained": loading_and_saving,
    "save_pretrained": saving,
}


def call(action: str, folder: Path, environment: dict[str, str]) -> dict[str, float]:
    """Measure an action in a process of its own."""
    for name in ("out", "run"):
        shutil.rmtree(folder / name, ignore_errors=True)
    if not action.startswith("command"):
        command = [sys.executable, "-W", "ignore", __file__, "--action", action, "--folder", str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
    published, run, out = (str(folder / name) for name in ("published", "run", "out"))
    forge = [sys.executable, "-m", "forge_core", "weights"]
    bring_in = [*forge, "import", published, "--out", run, "--no-tokenizer"]
    commands = {
        "command import": bring_in,
        "command export": [*forge, "export", run, "--out", out],
        "command from_pretrained": [sys.executable, "-c", LOAD, published],
        "command from_pretrained, save_pretrained": [
            sys.executable, "-c", f"{LOAD}; model.save_pretrained(sys.argv[2])", published, out
        ],
    }  # fmt: skip
    if action == "command export":
        subprocess.run(bring_in, env=environment, capture_output=True, check=True)
    forget(folder)
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(commands[action], env=environment, capture_output=True, check=True)
    flush(folder / "out")
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu": cpu, "peak_mb": 0.0}


def main() -> None:
    options = arguments()
    if options.action == "write":
        write_model(options.folder / "published", options.gigabytes)
        write_model(options.folder / "tiny/published", 0.0, dim=64)
        return
    if options.action:
        measure(options.action, options.folder)
        return
    environment = os.environ | {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    peers = {ours: peer for ours, peer in PEERS.items() if options.only in ours}
    actions = list(dict.fromkeys([*peers, *peers.values()]))
    rows: dict[str, list[dict[str, float]]] = {action: [] for action in actions}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In a process of its own, as all: a process begins with the peak of memory of the one that started it.
        write = ["--action", "write", "--folder", name, "--gigabytes", str(options.gigabytes)]
        subprocess.run([sys.executable, "-W", "ignore", __file__, *write], env=environment, check=True)
        size = sum(path.stat().st_size for path in (folder / "published").glob("*.safetensors")) / 1e9
        for _ in range(options.rounds):
            for action in actions:
                rows[action].append(call(action, folder, environment))
    print(f"{size:.2f} GB, medians of {options.rounds}, in brackets the least")
    medians = {
        action: {key: statistics.median(row[key] for row in runs) for key in runs[0]} for action, runs in rows.items()
    }
    least = {action: {key: min(row[key] for row in runs) for key in runs[0]} for action, runs in rows.items()}
    for action, values in medians.items():
        peak = f"{values['peak_mb']:7,.0f} MB at the peak" if values["peak_mb"] else ""
        times = f"{values['seconds']:6.2f} s ({least[action]['seconds']:.2f})"
        print(f"{action:42} {times}  {values['cpu']:6.2f} s of CPU ({least[action]['cpu']:.2f})  {peak}")
    for ours, peer in peers.items():
        ratios = (table[ours]["seconds"] / table[peer]["seconds"] for table in (medians, least))
        print(f"{ours} / {peer}: {next(ratios):.2f}, of the least {next(ratios):.2f}")


if __name__ == "__main__":
    main()
