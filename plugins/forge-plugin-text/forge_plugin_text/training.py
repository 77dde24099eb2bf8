"""Training of byte-level BPE with `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer


def train_bpe(texts: Iterator[str], vocab_size: int, min_frequency: int, special_tokens: Sequence[str]) -> Tokenizer:
    """Train BPE: special tokens have the first ids, then the 256 bytes, then the merges in the order of learning."""
    tokenizer = Tokenizer(BPE())
    # No space before a text, which decoding would return; words are split by GPT-2's pattern.
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(special_tokens),
        # All bytes, seen in the corpus or not, so that any text can be encoded
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
