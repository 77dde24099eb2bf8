"""A corpus that takes longer than `launch.hang_timeout_s` to tokenize starts on two ranks; the second does the work."""

from __future__ import annotations

import time

import pytest

from forge_core.contracts.phase import Phase

pytestmark = pytest.mark.slow

SLOW_BYTES = """
import os
import time
from pathlib import Path

from attrs import frozen
from forge_core import TokenizerComponent
from forge_plugin_text.bytes import Bytes, ByteTokenizer
from forge_testing.tiny import VOCABULARY


class SlowTokenizer(ByteTokenizer):
    vocab_size, end_of_text = VOCABULARY, 0

    def encode(self, text):
        return [1 + byte % (VOCABULARY - 1) for byte in text.encode()]

    def encode_batch(self, texts):
        Path("begun").touch()
        time.sleep(5)
        return super().encode_batch(texts)

    def fingerprint(self):  # asked for after rank 0 has looked at the files for both
        while os.environ["RANK"] == "0" and not Path("begun").exists():
            time.sleep(0.05)
        return super().fingerprint()


@frozen(kw_only=True)
class SlowBytes(Bytes):
    def build(self, context, documents):
        return SlowTokenizer()
"""

BATCHES, DOCUMENTS_OF_A_BATCH = 5, 1024


def test_a_corpus_that_tokenizes_for_longer_than_the_limit_starts_on_two_ranks(job):
    (job.folder / "slow.py").write_text(SLOW_BYTES)
    lines = (f'{{"text": "document {number}"}}\n' for number in range(BATCHES * DOCUMENTS_OF_A_BATCH))
    (job.folder / "corpus.jsonl").write_text("".join(lines))
    source = '--data.sources=[{type = "text", path = "corpus.jsonl", held_out_every = 0}]'
    keys = (
        *(source, "--data.tokenizer={type = './slow.py:SlowBytes'}"),
        *("--launch.hang_timeout_s=15", "--loggers.console.every=3"),
    )
    began = time.monotonic()
    code, out, err = job.finish(job.start("--nproc", "2", *keys))
    assert (code, err) == (0, ""), err
    # Rank 0 shows what it does, and it is the one that waits.
    assert f"{Phase.READING}: waiting for another process" in out
    assert "encoding" not in out
    assert time.monotonic() - began > 5 * BATCHES
