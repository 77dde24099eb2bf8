"""The components `causal`, `bidirectional`, `chunked` and `global_local`: masks of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import gt

from forge_plugin_transformer.kinds import AttentionMaskComponent, BlockMaskComponent
from forge_plugin_transformer.scoring import visible_pairs

if TYPE_CHECKING:
    from torch import Tensor


@frozen(kw_only=True)
class CausalMask(AttentionMaskComponent):
    """A position sees itself and every earlier one."""

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Hides later positions, which attention hides anyway."""
        return query >= key

    def hides(self, length: int) -> bool:
        """Returns False."""
        return False


@frozen(kw_only=True)
class BidirectionalMask(AttentionMaskComponent):
    """A position sees every position, also later ones, as in encoders.

    For losses that do not predict the next token (`predicts_next_token = False`): masked or diffusion language models,
    rewards of whole answers.
    """

    causal: ClassVar[bool] = False

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Hides nothing."""
        return (query >= 0) & (key >= 0)  # true everywhere, in the shape of both

    def hides(self, length: int) -> bool:
        """Returns False."""
        return False

    def pairs(self, length: int) -> float:
        """Returns the number of all pairs."""
        return float(length * length)


@frozen(kw_only=True)
class ChunkedMask(BlockMaskComponent):
    """A position sees itself and the earlier ones of its chunk (Llama 4).

    Chunks are counted from the start of each document, in generation from the start of the row.
    """

    chunk_size: int = field(default=8192, validator=gt(0))
    """Positions of a chunk; `attention_chunk_size` of Hugging Face configurations."""

    def block(self, position: Tensor) -> Tensor:
        """Returns the number of the chunk."""
        return position // self.chunk_size

    def reach(self) -> int:
        """The last position of a chunk sees the whole chunk."""
        return self.chunk_size

    def hides(self, length: int) -> bool:
        """Returns whether there is a second chunk."""
        return length > self.chunk_size

    def pairs(self, length: int) -> float:
        """Returns the pairs of all chunks, of which the last may be shorter."""
        whole, rest = divmod(length, self.chunk_size)
        return whole * visible_pairs(self.chunk_size) + visible_pairs(rest)


@frozen(kw_only=True)
class GlobalLocalMask(AttentionMaskComponent):
    """The latest positions, and the first ones of the document (StreamingLLM, Xiao et al. 2023).

    The causal form of Longformer's pattern (Beltagy et al. 2020), whose global positions are the first ones.
    """

    window: int = field(validator=gt(0))
    """Positions that one sees at most before and including itself, in addition to the global ones."""
    global_positions: int = field(default=4, validator=gt(0))
    """First positions of a document, which every later one of it sees."""

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Shows keys in the window, and the first ones of the document."""
        return (query - key < self.window) | (key < self.global_positions)

    def hides(self, length: int) -> bool:
        """Returns whether the last position misses one between the global ones and its window."""
        return length > self.window + self.global_positions

    def pairs(self, length: int) -> float:
        """Returns the pairs of a window with the global positions in it, as many as there are of both."""
        return visible_pairs(length, self.window + self.global_positions)
