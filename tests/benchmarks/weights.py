"""Wall time and memory of bringing a published model in and taking it out, beside `transformers`' load and save.

    python tests/benchmarks/weights.py [--gigabytes 1] [--rounds 3]

A Llama of random weights in bfloat16. In: `forge-run weights import`, which links the files and hashes them, and that
followed by reading all tensors into a model; `from_pretrained`. Out: `forge-run weights export`; `save_pretrained` of a
model that is loaded. Files are taken out of the page cache before each measurement, and written ones are flushed. Each
figure is that of a process of its own, in turns; imports of libraries are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ACTIONS = ("import", "import, read", "from_pretrained", "export", "save_pretrained")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--action", choices=(*ACTIONS, "write"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def write_model(folder: Path, gigabytes: float) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    dim, of_layer = 1024, 4 * 1024**2 + 3 * 1024 * 4096
    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * 32_000 * dim) / of_layer))
    config = LlamaConfig(
        hidden_size=dim, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=16, vocab_size=32_000
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
    import torch
    from transformers import LlamaForCausalLM

    from forge_plugin_weights.exporting import export_run
    from forge_plugin_weights.importing import import_folder

    published, run, out = folder / "published", folder / "run", folder / "out"
    for path in (out, *([run] if action.startswith("import") else [])):
        shutil.rmtree(path, ignore_errors=True)
    model = LlamaForCausalLM.from_pretrained(published) if action == "save_pretrained" else None
    if action in ("export",) and not run.exists():
        import_folder(published, run, tokenizer=False)
    forget(folder)
    began = time.perf_counter()
    if action.startswith("import"):
        import_folder(published, run, tokenizer=False)
        if action != "import":
            read(run)
    elif action == "from_pretrained":
        model = LlamaForCausalLM.from_pretrained(published)
        for parameter in model.parameters():  # it maps the files: a byte of each page brings them in
            parameter.detach().view(-1).view(torch.uint8)[::4096].sum()
    elif action == "export":
        export_run(run, out)
    else:
        model.save_pretrained(out, max_shard_size="5GB")
    flush(out) if out.exists() else None
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak_mb": peak}))


def read(run: Path) -> None:
    """Every tensor of the checkpoint, into memory of its own."""
    from forge_core.checkpoint.tensors import stored_tensors
    from forge_kit.whole_tensors import read_whole

    checkpoint = run / "checkpoints/step-0"
    stored = stored_tensors(checkpoint)
    read_whole(checkpoint, stored, stored)


def main() -> None:
    options = arguments()
    if options.action == "write":
        write_model(options.folder / "published", options.gigabytes)
        return
    if options.action:
        measure(options.action, options.folder)
        return
    environment = os.environ | {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    rows: dict[str, list[dict[str, float]]] = {action: [] for action in ACTIONS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In a process of its own, as all: a process begins with the peak of memory of the one that started it.
        write = ["--action", "write", "--folder", name, "--gigabytes", str(options.gigabytes)]
        subprocess.run([sys.executable, "-W", "ignore", __file__, *write], env=environment, check=True)
        size = sum(path.stat().st_size for path in (folder / "published").glob("*.safetensors")) / 1e9
        for _ in range(options.rounds):
            for action in ACTIONS:
                command = [sys.executable, "-W", "ignore", __file__, "--action", action, "--folder", name]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                rows[action].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{size:.2f} GB, medians of {options.rounds}")
    for action, runs in rows.items():
        seconds, peak = (statistics.median(row[key] for row in runs) for key in ("seconds", "peak_mb"))
        print(f"{action:16} {seconds:6.2f} s  {peak:7,.0f} MB at the peak")


if __name__ == "__main__":
    main()
