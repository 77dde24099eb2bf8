"""What llama.cpp's conversion and vLLM read of an export.

`other_programs.json` has, by the class in `architectures`, the keys that each reads without a default, and for
llama.cpp the names of tensors, with N for numbers: `tensors` are in every model, `optional` ones in some. A text in
place of a table is why there is none. The facts are from a run of llama.cpp's `convert_hf_to_gguf.py` (b11434, with
the version of transformers that it requires) on these models' exports, once more without each key, and from the source
of vLLM 0.32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import transformers

PROGRAMS: dict[str, Any] = json.loads(Path(__file__).with_name("other_programs.json").read_text())
REFUSED = {"cohere2, listed", "cohere, untied", "falcon_h1, norm", "lfm2_moe, not normalised"}
"""Variants that llama.cpp's conversion refuses: biases, an untied head, a norm."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def check_other_programs(variant: str, folder: Path, tensors: Collection[str]) -> None:
    """Check that an export has all keys and tensors that llama.cpp and vLLM need, and no tensor that is unknown.

    Args:
        variant: name of the model in `MODELS`.
        folder: the export.
        tensors: their names.
    """
    config = json.loads((folder / "config.json").read_text())
    (name,) = config["architectures"]
    converter, server = PROGRAMS[name]["llama.cpp"], PROGRAMS[name]["vLLM"]
    if isinstance(converter, dict) and variant not in REFUSED:
        assert {*converter["keys"]} <= {*config}
        patterns = {NUMBER.sub("N", tensor) for tensor in tensors}
        assert {*converter["tensors"]} <= patterns <= {*converter["tensors"], *converter["optional"]}
    if isinstance(server, dict):
        read = transformers.AutoConfig.from_pretrained(folder)  # as vLLM does
        assert not [key for key in server["keys"] if not hasattr(read, key)]
