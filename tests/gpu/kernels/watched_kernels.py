"""Whether the table of kernels has to be compared again: the digest of all that it depends on."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from importlib import metadata
from pathlib import Path

import watched

ROOT = Path(__file__).resolve().parents[3]
RECORD = Path(__file__).with_name("table.sha256")
WATCHED = (
    "forge_core/contracts",
    "plugins/forge-kit/forge_kit/nn",
    "plugins/forge-plugin-compile/forge_plugin_compile",
    "plugins/forge-plugin-losses/forge_plugin_losses",
    "plugins/forge-plugin-mla/forge_plugin_mla",
    "plugins/forge-plugin-moe/forge_plugin_moe",
    "plugins/forge-plugin-mot/forge_plugin_mot",
    "plugins/forge-plugin-muon/forge_plugin_muon",
    "plugins/forge-plugin-transformer/forge_plugin_transformer",
    "plugins/forge-plugin-vision/forge_plugin_vision",
    "tests/gpu/kernels",
)
"""What blocks, losses and optimizers of the recipes are made of, and the program itself."""
RECIPES = ("dense", "windows", "experts", "latent", "tower", "mot", "muon")
"""Blocks of the table, see `gpu.kernels.blocks`, which imports torch."""
TRITON = "3.9.0"
"""The version of Triton with which the table was recorded; `make kernels` installs it."""


def digest() -> str:
    """SHA-256 of the code of the watched files, and of the versions of torch and Triton."""
    torch = metadata.version("torch").partition("+")[0]
    total = hashlib.sha256(f"torch {torch}, triton {TRITON}\n".encode())
    for path in sorted(path for folder in WATCHED for path in (ROOT / folder).rglob("*.py")):
        code = watched.code(path.read_bytes())
        total.update(f"{path.relative_to(ROOT)}\0{hashlib.sha256(code.encode()).hexdigest()}\n".encode())
    return total.hexdigest()


def reason_to_run() -> str:
    """Why the table has to be compared; empty if it has not."""
    recorded = RECORD.read_text().strip() if RECORD.exists() else ""
    return "" if recorded == digest() else "sources of blocks or the version of torch have changed since the table"


def record() -> None:
    """Write down that the table is that of what is here."""
    RECORD.write_text(f"{digest()}\n")


def cannot_run() -> str | None:
    """Why kernels cannot be compiled here; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return f"needs triton, which is not installed: `make kernels` installs triton=={TRITON}"
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return "needs torch, which is not installed"
    if (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return "needs a torch without CUDA, such as make kernels VENV=.venv-cpu TORCH=torch==2.13.0+cpu installs"
    if shutil.which("g++") is None:
        return "needs g++, which is not installed"
    return None
