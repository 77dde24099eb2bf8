"""The conformance suite of datasets, applied to prompts."""

from __future__ import annotations

import json

from forge_plugin_grpo import GRPO, Answer, Prompts
from forge_plugin_text import Bytes
from forge_testing.suites import DatasetSuite


class TestPrompts(DatasetSuite):
    job = {"data": {"tokenizer": Bytes()}, "loss": GRPO(rewards={"sum": Answer()}, group=2, max_tokens=2)}

    def make(self, folder):
        path = folder / "a.jsonl"
        path.write_text("".join(json.dumps({"prompt": chr(97 + n), "answer": n}) + "\n" for n in range(24)))
        return Prompts(path=str(path), held_out_every=4)
