"""Exact substrings: passages of tokens that occur more than once are cut out of the documents that have them.

datatrove writes the tokens of all documents, each after a separator, as one sequence, and reads ranges of its bytes
that are to be removed. In between it leaves the user to Google's `deduplicate-text-datasets` (`self-similar` and
`collect`), a program in Rust that is built from its source. `RepeatedRanges` does the same in memory, by libdivsufsort,
and writes the file that `collect` prints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import ESRangeRemover
from datatrove.pipeline.dedup.exact_substrings import SEPARATOR_BYTES
from datatrove.utils.tokenization import load_tokenizer
from datatrove.utils.typeshelper import ExtensionHelperES
from numpy.lib.stride_tricks import sliding_window_view

from forge_plugin_datatrove.accounting import RANGES

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOKEN = 2
"""Bytes of a token in datatrove's sequences."""
CHUNK = 1 << 20
"""Numbers, or bytes of windows, that are looked at together: enough for numpy, and little next to the suffix array."""
SAMPLE = 'It\'s "é" and "é", 漢字 \U0001f600:\r\n\n\t x  =  0.5  '
"""Text that a tokenizer must give back: both forms of an accent, characters of 1 to 4 bytes, all kinds of space."""


@define
class Repeats:
    """Options of the step that finds repeated passages."""

    min_tokens: int = 50
    keep_first: bool = False


def repeated_ranges(
    sequence: NDArray[np.uint8],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    min_tokens: int,
    keep_first: bool = False,
) -> NDArray[np.int64]:
    """Returns the ranges of a sequence whose tokens are part of a passage that occurs at another place, too.

    A passage is `min_tokens` tokens of one document. Google's program compares bytes of the whole sequence: it finds
    passages that begin in the middle of a token, and others that reach into a separator, which has the numbers of task
    and document, so that its result depends on how the documents were divided.

    Args:
        sequence: datatrove's, of 2 bytes a token and with 12 before each document.
        begins: of documents, in bytes, after their separators.
        ends: of documents, in bytes.
        min_tokens: length of a passage from which it counts.
        keep_first: whether the first occurrence of each passage is left out of the ranges. Without it, as by Google's
            program, no occurrence remains.

    Returns:
        Begin and end of each range in bytes, ascending; ranges that overlap or touch are one. Shape: ranges, 2.
    """
    windows = _window_starts(len(sequence) // TOKEN, begins // TOKEN, ends // TOKEN, min_tokens)
    if not windows.any():
        return np.empty((0, 2), np.int64)
    places = _sorted_windows(sequence, windows)
    same = _equal_neighbours(sequence, places, min_tokens)
    # A window occurs again if it equals the one before it in this order, or the one after it
    repeated = same[:-1] | same[1:]
    # The suffix array, which is most of the memory, ends with its name
    places = places[repeated]
    windows[:] = False
    windows[places] = True
    if keep_first and len(places):
        groups = np.flatnonzero(~same[:-1][repeated])
        windows[np.minimum.reduceat(places, groups)] = False
    return _covered(windows, min_tokens) * TOKEN


def _window_starts(
    tokens: int, begins: NDArray[np.int64], ends: NDArray[np.int64], min_tokens: int
) -> NDArray[np.bool_]:
    """Returns for each token whether a passage of enough tokens of its document begins with it."""
    has_room = ends - begins >= min_tokens
    steps = np.zeros(tokens + 1, np.int8)
    steps[begins[has_room]] = 1
    # Between two documents there is a separator, so that no end is the begin of another
    steps[ends[has_room] - min_tokens + 1] -= 1
    return np.cumsum(steps, out=steps)[:-1].view(np.bool_)


def _sorted_windows(sequence: NDArray[np.uint8], windows: NDArray[np.bool_]) -> NDArray[Any]:
    """Returns where windows begin, in tokens, so that equal ones are next to each other."""
    from pydivsufsort import divsufsort

    # By bytes, which is an order of tokens, too, if not by their numbers; pydivsufsort would copy 16-bit numbers thrice
    suffixes = divsufsort(sequence)
    count = 0
    for start in range(0, len(suffixes), CHUNK):
        part = suffixes[start : start + CHUNK]
        places = part[part % TOKEN == 0] // TOKEN
        places = places[windows[places]]
        # In its own memory, which is most of what the step takes: fewer are written than were read
        suffixes[count : count + len(places)] = places
        count += len(places)
    return suffixes[:count]


def _equal_neighbours(sequence: NDArray[np.uint8], places: NDArray[Any], min_tokens: int) -> NDArray[np.bool_]:
    """Returns for each window whether it equals the one before it, and False after the last one."""
    views = sliding_window_view(sequence.view("<u2"), min_tokens)
    same = np.zeros(len(places) + 1, np.bool_)
    rows = max(1, CHUNK // min_tokens)
    for start in range(1, len(places), rows):
        stop = min(start + rows, len(places))
        equal = views[places[start:stop]] == views[places[start - 1 : stop - 1]]
        same[start:stop] = equal.all(axis=1)
    return same


def _covered(windows: NDArray[np.bool_], length: int) -> NDArray[np.int64]:
    """Returns the ranges that windows of a length cover together, by where windows begin."""
    parts = [np.empty((0, 2), np.int64)]
    for start in range(0, len(windows), CHUNK):
        begins = start + np.flatnonzero(windows[start : start + CHUNK])
        parts.append(_joined(np.stack([begins, begins + length], axis=1)))
    # A range may reach into the next part
    return _joined(np.concatenate(parts))


def _joined(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns ranges of which those that overlap or touch are one; begins and ends ascend."""
    begins, ends = ranges.T
    apart = begins[1:] > ends[:-1]
    first = np.concatenate([[True], apart])[: len(ranges)]
    last = np.concatenate([apart, [True]])[: len(ranges)]
    return np.stack([begins[first], ends[last]], axis=1)


class RepeatedRanges(PipelineStep):  # type: ignore[misc]  # datatrove has no types
    """Finds the repeated passages of datatrove's merged sequence, in one task, and writes their ranges.

    Args:
        folder: of the sequences.
        options: length of a passage, and whether its first occurrence stays.
    """

    type = "ranges"
    name = "repeated passages"

    def __init__(self, folder: str, options: Repeats) -> None:
        super().__init__()
        self.folder = folder
        self.options = options

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Writes `dataset.bytearange`."""
        del data, rank, world_size
        folder = Path(self.folder)
        sequence = np.fromfile(folder / f"dataset{ExtensionHelperES.stage_2_big_sequence}", np.uint8)
        # By rank, which is the order of the merged sequence
        paths = sorted(folder.glob(f"*{ExtensionHelperES.stage_1_sequence_size}"))
        sizes = np.concatenate([np.fromfile(path, "<u8") for path in paths]).astype(np.int64)
        ends = np.cumsum(sizes)
        begins = ends - sizes + SEPARATOR_BYTES
        ranges = repeated_ranges(sequence, begins, ends, self.options.min_tokens, self.options.keep_first)
        self.stat_update("ranges", value=len(ranges))
        self.stat_update("tokens", value=int((ranges[:, 1] - ranges[:, 0]).sum()) // TOKEN)
        # What `collect` prints: readers skip all lines up to this one
        with (folder / f"dataset{ExtensionHelperES.stage_3_bytes_ranges}").open("w") as file:
            file.write("out\n")
            file.writelines(f"{begin} {end}\n" for begin, end in ranges.tolist())


class SubstringRemover(ESRangeRemover):  # type: ignore[misc]  # datatrove has no types
    """datatrove's reader of ranges, which removes them by their place.

    As it comes, `ESRangeRemover` (0.10.1) replaces each text that equals that of a range, wherever it is, and none if
    the range begins within a character; it loses all documents of a task without ranges, and removes short documents
    that it has not changed. The ranges of a document, in characters, are left in its metadata.
    """

    leaves_ranges = True
    """So that `Accounted` records them."""

    @cached_property
    def token_bytes(self) -> NDArray[np.int64]:
        """Bytes of text for each token."""
        return bytes_of_tokens(self.tokenizer)

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yields documents without repeated passages, and leaves out those that are too short then."""
        self.reset()
        self.rank = rank
        self.get_all_files(rank, world_size)
        yield from super().run(data, rank, world_size) if self.dup_ranges else data

    def remove_duplicate(self, doc: Document, bytes_content: bytes) -> bool:
        """Cuts the ranges of a document out of its text; returns whether enough of it is left."""
        ranges = self.get_duplicate_range(len(bytes_content))
        self.bytes_counter += len(bytes_content)
        if not ranges:
            return True
        tokens = np.frombuffer(bytes_content, "<u2", offset=SEPARATOR_BYTES)
        bounds = np.concatenate([[0], np.cumsum(self.token_bytes[tokens])])
        places = bounds[(np.array(ranges) - SEPARATOR_BYTES) // TOKEN]
        doc.text, doc.metadata[RANGES] = without(doc.text, [*map(tuple, places.tolist())])
        # Without any word it has no use, whatever the limit is
        return len(self.word_tokenizer.word_tokenize(doc.text)) >= max(1, self.min_doc_words)


def without(text: str, ranges: list[tuple[int, int]]) -> tuple[str, list[list[int]]]:
    """Cut ranges out of a text. A character of which a range has only some bytes stays.

    Args:
        text: any text.
        ranges: begin and end in bytes of UTF-8, ascending and disjoint.

    Returns:
        The rest, and begin and end of what was cut out, in characters.
    """
    utf8 = text.encode()
    last, place, kept, cut = 0, 0, "", []
    for outer in ranges:
        begin, end = _whole_characters(utf8, *outer)
        if begin == end:
            continue
        before = utf8[last:begin].decode()
        start = place + len(before)
        place = start + len(utf8[begin:end].decode())
        kept += before
        cut.append([start, place])
        last = end
    return kept + utf8[last:].decode(), cut


def _whole_characters(utf8: bytes, begin: int, end: int) -> tuple[int, int]:
    """Returns the largest range within a range that begins and ends between two characters."""
    while begin < end and _is_inside_character(utf8, begin):
        begin += 1
    while begin < end and _is_inside_character(utf8, end):
        end -= 1
    return begin, end


def _is_inside_character(utf8: bytes, place: int) -> bool:
    return place < len(utf8) and utf8[place] & 0b1100_0000 == 0b1000_0000


def bytes_of_tokens(tokenizer: Any) -> NDArray[np.int64]:
    """Returns the bytes of text of each token of a byte-level tokenizer, by id."""
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for token, id_ in vocabulary.items():
        # Byte-level vocabularies write each byte as one character; texts of added tokens are themselves
        lengths[id_] = len(added[id_].content.encode()) if id_ in added else len(token)
    return lengths


def tokenizer_fault(name: str) -> str:
    """Returns why datatrove's sequences cannot be made by a tokenizer; empty if they can.

    Args:
        name: path of a `tokenizer.json`, or a name on the Hugging Face Hub.
    """
    try:
        tokenizer = load_tokenizer(name)
    # tokenizers raises nothing more precise
    except Exception as error:
        return f"{name} cannot be read: {error}"
    lengths = bytes_of_tokens(tokenizer)
    if len(lengths) > 1 << 8 * TOKEN:
        return f"{name} has {len(lengths):,} tokens, and datatrove's sequences have room for {1 << 8 * TOKEN:,}"
    ids = tokenizer.encode(SAMPLE).ids
    same = tokenizer.decode(ids, skip_special_tokens=False) == SAMPLE
    if same and lengths[ids].sum() == len(SAMPLE.encode()):
        return ""
    return f"{name} does not give back the bytes of a text; a byte-level tokenizer without normalizer is needed"


def tokenizer_identity(name: str) -> dict[str, str]:
    """Returns what tells one tokenizer from another: tasks that used two would find nothing in common."""
    return {"tokenizer": hashlib.sha256(load_tokenizer(name).to_str().encode()).hexdigest()}
