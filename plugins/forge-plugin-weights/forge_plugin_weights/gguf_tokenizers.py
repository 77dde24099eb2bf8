"""Tokenizers in GGUF's metadata, in both directions: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

The metadata names the pattern that splits texts (`tokenizer.ggml.pre`), and llama.cpp has the patterns. Those that are
known here are the patterns of the published `tokenizer.json` files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_plugin_weights.gguf_files import GgufFile, library
from forge_plugin_weights.matching import listed

GENERATION = "generation_config.json"
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""
FILLER = re.compile(r"\[PAD\d+\]")
"""Names of the rows of an embedding that no token has."""
BYTE_NAME = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "▁"
"""A space in a piece of SentencePiece."""
UNSCORED = -1e6
"""Score of pieces that no merge makes."""
PREFIX = "tokenizer.ggml."
IDS: Mapping[str, str] = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
}
"""Keys of ids, and the keys of `tokenizer_config.json` with these tokens."""
STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of the tokens that end a text, a turn and a message."""
READ = (
    *("model", "pre", "tokens", "scores", "token_type", "merges", "add_bos_token", "add_eos_token"),
    *("add_space_prefix", *IDS, *STOPS),
)
SILENT = ("seperator_token_id", "separator_token_id", "mask_token_id", "cls_token_id", "token_type_count")
"""Keys that change no ids of a text; nor do the keys of fill-in-the-middle below."""
FILL_IN = ("fim_", "prefix_token_id", "suffix_token_id", "middle_token_id")
FALSE_ONLY = ("add_sep_token", "remove_extra_whitespaces")
"""Keys that are read where they are false."""
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
HINT = "name a folder with the tokenizer's files by --tokenizer FOLDER, or leave it out with --no-tokenizer"


@frozen(kw_only=True)
class Splitting:
    """How texts become the pieces that are merged within."""

    pattern: str = ""
    """Empty: the pattern of GPT-2, which the part `ByteLevel` of `tokenizers` has."""
    digits: bool = False
    """Whether digits are split off one by one first."""
    ignore_merges: bool = False
    """Whether a piece that is a token is that token, whatever the merges make of it."""
    begins: bool = False
    """Whether texts begin with the beginning of text where the metadata does not say."""
    normalizer: Mapping[str, Any] | None = None

    def pre_tokenizer(self) -> dict[str, Any]:
        """Returns the table of a `tokenizer.json`."""
        parts: list[dict[str, Any]] = []
        if self.digits:
            parts.append({"type": "Digits", "individual_digits": True})
        if self.pattern:
            pattern = {"Regex": self.pattern}
            parts.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
        use_regex = not self.pattern
        parts.append(
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex},
        )
        return parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts}


LLAMA3 = Splitting(pattern=rf"{ENDINGS}|{WORDS}|\p{{N}}{{1,3}}|{REST}", ignore_merges=True, begins=True)
SPLITTINGS: Mapping[str, Splitting] = {
    "gpt-2": Splitting(),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": Splitting(pattern=rf"{ENDINGS}|{WORDS}|\p{{N}}|{REST}", normalizer={"type": "NFC"}),
    "smollm": Splitting(digits=True),
    "tekken": Splitting(
        pattern=rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ignore_merges=True,
        begins=True,
    ),
}
"""By the value of `tokenizer.ggml.pre`, as `llama-vocab.cpp` of llama.cpp has them."""


# --- in ----------------------------------------------------------------------------------------------------------


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write the tokenizer of a file as a published model has it.

    Args:
        file: with the tokenizer in its metadata.
        folder: for `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`.

    Raises:
        JobError: it has none, or one that these files cannot express exactly.
    """
    keys = {name.removeprefix(PREFIX): value for name, value in file.metadata.items() if name.startswith(PREFIX)}
    kind = keys.get("model", "none")
    if kind not in ("gpt2", "llama"):
        raise JobError(f"{file.path}: {PREFIX}model = {kind!r}; gpt2 and llama are read; {HINT}")
    unknown = [name for name in keys if name not in (*READ, *SILENT, *FALSE_ONLY) and not name.startswith(FILL_IN)]
    unknown += [name for name in FALSE_ONLY if keys.get(name)]
    if unknown:
        raise JobError(f"{file.path}: {PREFIX}{unknown[0]} = {str(keys[unknown[0]])[:40]} is not read; {HINT}")
    try:
        table = _byte_level(file.path, keys) if kind == "gpt2" else _sentencepiece(keys)
        settings = _settings(file, keys)
        stops = list(dict.fromkeys(keys[name] for name in STOPS if name in keys))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise JobError(f"{file.path}: the tokenizer is damaged ({type(error).__name__}: {error}); {HINT}") from error
    (folder / TOKENIZER_JSON).write_text(json.dumps(table, ensure_ascii=False))
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(settings, ensure_ascii=False, indent=2))
    ids = {name: keys[name] for name in ("bos_token_id",) if name in keys}
    if stops:
        ids["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    (folder / GENERATION).write_text(json.dumps(ids, indent=2))


def _settings(file: GgufFile, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `tokenizer_config.json`."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {token: keys["tokens"][keys[name]] for name, token in IDS.items() if name in keys}
    if template := file.metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return settings


def _vocabulary(keys: Mapping[str, Any]) -> dict[str, int]:
    """Ids of tokens, without the rows that no token has."""
    types = keys.get("token_type") or [NORMAL] * len(keys["tokens"])
    pairs = zip(keys["tokens"], types, strict=True)
    return {
        token: number for number, (token, kind) in enumerate(pairs) if kind != UNUSED or not FILLER.fullmatch(token)
    }


def _added(keys: Mapping[str, Any], kinds: Sequence[int]) -> list[dict[str, Any]]:
    """The list `added_tokens`: those that no merge makes."""
    shape = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    types = keys.get("token_type") or ()
    return [
        {"id": number, "content": keys["tokens"][number], **shape, "special": kind != USER_DEFINED}
        for number, kind in enumerate(types)
        if kind in kinds
    ]


def _template(keys: Mapping[str, Any], begins: bool) -> dict[str, Any] | None:
    """The table by which texts begin and end with tokens."""
    tokens = keys["tokens"]
    first = [keys["bos_token_id"]] if keys.get("add_bos_token", begins) and "bos_token_id" in keys else []
    last = [keys["eos_token_id"]] if keys.get("add_eos_token", False) else []
    if not first and not last:
        return None
    mark = lambda id_, type_: {"SpecialToken": {"id": tokens[id_], "type_id": type_}}  # noqa: E731
    parts = {
        letter: [
            *(mark(id_, type_) for id_ in first),
            {"Sequence": {"id": letter, "type_id": type_}},
            *(mark(id_, type_) for id_ in last),
        ]
        for letter, type_ in (("A", 0), ("B", 1))
    }
    special = {tokens[id_]: {"id": tokens[id_], "ids": [id_], "tokens": [tokens[id_]]} for id_ in (*first, *last)}
    pair = [*parts["A"], *parts["B"]]
    return {"type": "TemplateProcessing", "single": parts["A"], "pair": pair, "special_tokens": special}


def _table(keys: Mapping[str, Any], kinds: Sequence[int], begins: bool, **parts: Any) -> dict[str, Any]:
    """The content of `tokenizer.json`."""
    model = {
        "type": "BPE",
        "dropout": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        **parts.pop("model"),
        "vocab": _vocabulary(keys),
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(keys, kinds),
        "post_processor": _template(keys, begins),
        **parts,
        "model": model,
    }


def _byte_level(path: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
    name = keys.get("pre", "")
    if name not in SPLITTINGS:
        raise JobError(f"{path}: {PREFIX}pre = {name!r}; {', '.join(SPLITTINGS)} are read; {HINT}")
    splitting = SPLITTINGS[name]
    return _table(
        keys,
        (UNKNOWN, CONTROL, USER_DEFINED),
        splitting.begins,
        normalizer=splitting.normalizer,
        pre_tokenizer=splitting.pre_tokenizer(),
        decoder={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        model={
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": splitting.ignore_merges,
            "merges": list(keys["merges"]),
        },
    )


def _sentencepiece(keys: Mapping[str, Any]) -> dict[str, Any]:
    """As `transformers` makes the files of Llama 2 of its `tokenizer.model`, whose pieces and scores GGUF has."""
    prefix = [{"type": "Prepend", "prepend": SPACE}] if keys.get("add_space_prefix", True) else []
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = keys["tokens"][keys.get("unknown_token_id", 0)]
    return _table(
        keys,
        (UNKNOWN, CONTROL, USER_DEFINED),
        True,
        normalizer={"type": "Sequence", "normalizers": [*prefix, spaces]},
        pre_tokenizer=None,
        decoder={
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        model={
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "merges": _merges(keys),
        },
    )


def _merges(keys: Mapping[str, Any]) -> list[list[str]]:
    """Pairs of pieces that are a piece together, the highest score first: which pair SentencePiece merges first."""
    # Texts are searched for other tokens before
    types = keys.get("token_type") or [NORMAL] * len(keys["tokens"])
    ids = {token: number for token, number in _vocabulary(keys).items() if types[number] == NORMAL}
    pairs = []
    for piece, number in ids.items():
        halves = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        there = [(left, right) for left, right in halves if left in ids and right in ids]
        there.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        pairs += [(left, right, keys["scores"][number]) for left, right in there]
    # Stable: of pieces with one score the first in the vocabulary
    pairs.sort(key=lambda pair: (-pair[2], -len(pair[0]), -len(pair[1])))
    return [[left, right] for left, right, _ in pairs]


# --- out ---------------------------------------------------------------------------------------------------------


def add_tokenizer(writer: Any, folder: Path, output: Path, size: int) -> None:
    """Add the tokenizer in a folder as llama.cpp's `convert_hf_to_gguf.py` does.

    Args:
        writer: a `gguf.GGUFWriter`.
        folder: with `tokenizer.json`, `tokenizer_config.json` and `config.json`.
        output: the file, for errors.
        size: of the model's vocabulary; rows that no token has are filled up.

    Raises:
        JobError: llama.cpp has no such tokenizer.
    """
    table = _read(folder / TOKENIZER_JSON, output)
    model = table["model"]
    scores = _scores(table, output) if model.get("byte_fallback") else None
    name = "default" if scores is not None else _pre(table)
    if not name:
        refuse(output, "one whose splitting is none of these")
    added = {token["id"]: token for token in table.get("added_tokens", ())}
    names = {number: token for token, number in model["vocab"].items()}
    names |= {number: token["content"] for number, token in added.items()}
    if outside := [token for number, token in names.items() if number >= size]:
        refuse(output, f"one with tokens that the model has no row for ({listed(outside)})")
    if altered := [token["content"] for token in added.values() if token.get("lstrip") or token.get("rstrip")]:
        refuse(output, f"one whose added tokens take the spaces around them ({listed(altered)})")
    writer.add_tokenizer_model("gpt2" if scores is None else "llama")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([names.get(number, f"[PAD{number}]") for number in range(size)])
    types = [_type(number, names, added) for number in range(size)]
    if scores is not None:
        writer.add_token_scores([scores.get(names.get(number, ""), UNSCORED) for number in range(size)])
        types = [_sentencepiece_type(names.get(number, ""), kind, model) for number, kind in enumerate(types)]
        if _space_prefix(table) is False:
            writer.add_add_space_prefix(False)
    writer.add_token_types(types)
    special = library(output).SpecialVocab(folder, load_merges=scores is None, n_vocab=size)
    if scores is not None:  # always there, and read by no post-processor
        special.special_token_ids.setdefault("unk", model["vocab"][model["unk_token"]])
    if scores is not None or SPLITTINGS[name].begins:  # llama.cpp would add it where the metadata does not say
        special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)


def _read(path: Path, output: Path) -> Mapping[str, Any]:
    try:
        table: Mapping[str, Any] = json.loads(path.read_text())
        if table["model"].get("type") == "BPE" and "vocab" in table["model"]:
            return table
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        pass
    refuse(output, f"none with a {TOKENIZER_JSON} of BPE")
    raise AssertionError


def refuse(output: Path, what: str) -> None:
    """Raise the `JobError` for a tokenizer that GGUF does not get."""
    raise JobError(
        f"--out {output}: the run's tokenizer is {what}; byte-level BPE with the splitting {', '.join(SPLITTINGS)} is "
        "written, and BPE of SentencePiece as Llama 2 has it. Leave it out with --no-tokenizer, or export a folder"
    )


def _type(number: int, names: Mapping[int, str], added: Mapping[int, Mapping[str, Any]]) -> int:
    if number not in names:
        return UNUSED
    if number not in added:
        return NORMAL
    content = names[number]
    # As the converter does: some publishers do not mark such tokens as special
    special = added[number].get("special") or (content.startswith("<|") and content.endswith("|>"))
    return CONTROL if special else USER_DEFINED


def _space_prefix(table: Mapping[str, Any]) -> bool | None:
    """Whether a text of SentencePiece gets a space before it, also behind a special token; None: in another way."""
    if table.get("pre_tokenizer") is not None:
        return None
    normalizer = table.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    known = {True: [{"type": "Prepend", "prepend": SPACE}, spaces], False: [spaces]}
    return next((prefix for prefix, those in known.items() if steps == those), None)


def _scores(table: Mapping[str, Any], output: Path) -> dict[str, float]:
    """Scores of pieces: the higher, the earlier a merge makes the piece.

    The file has pairs in place of scores. They are refused where the pairs of these scores, by which llama.cpp merges,
    are others.
    """
    model = table["model"]
    if _space_prefix(table) is None:
        refuse(output, "one of SentencePiece that handles spaces in another way than Llama 2 does")
    if model.get("ignore_merges") or model.get("dropout") or model.get("unk_token") not in model["vocab"]:
        refuse(output, "one of SentencePiece with ignore_merges or dropout, or without an unknown token")
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    scores: dict[str, float] = {}
    for left, right in pairs:
        scores.setdefault(left + right, -float(len(scores)))
    ids = model["vocab"]
    tokens = [token for token, _ in sorted(ids.items(), key=lambda item: item[1])]
    added = {token["content"] for token in table.get("added_tokens", ())}
    types = [CONTROL if token in added else NORMAL for token in tokens]
    again = _merges(
        {"tokens": tokens, "scores": [scores.get(token, UNSCORED) for token in tokens], "token_type": types}
    )
    # Published files have the pairs of one piece in either order
    by_piece = [(left + right, left) for left, right in pairs]
    found = [(left + right, left) for left, right in again if left + right in scores]
    order = {piece: rank for rank, piece in enumerate(scores)}
    key = lambda pair: (order[pair[0]], pair[1])  # noqa: E731
    grouped = all(order[one[0]] <= order[other[0]] for one, other in pairwise(by_piece))
    if not grouped or sorted(by_piece, key=key) != sorted(found, key=key) or len(found) != len(again):
        refuse(output, "one whose merges do not follow from scores of its pieces")
    return scores


def _sentencepiece_type(token: str, kind: int, model: Mapping[str, Any]) -> int:
    if token and token == model["unk_token"]:
        return UNKNOWN
    return BYTE if kind == NORMAL and BYTE_NAME.fullmatch(token) else kind


def _pre(table: Mapping[str, Any]) -> str:
    """The name of a tokenizer's splitting; empty if none is its own."""
    model = table["model"]
    if model.get("byte_fallback") or model.get("dropout") or model.get("unk_token"):
        return ""
    for name, splitting in SPLITTINGS.items():
        same = bool(model.get("ignore_merges")) == splitting.ignore_merges
        normalizer = table.get("normalizer")
        if (
            same
            and normalizer == splitting.normalizer
            and _parts(table.get("pre_tokenizer")) == _parts(splitting.pre_tokenizer())
        ):
            return name
    return ""


def _parts(table: Any) -> list[Mapping[str, Any]]:
    """The steps of a splitting, without what does not change the pieces."""
    steps = table["pretokenizers"] if table and table["type"] == "Sequence" else [table]
    return [{key: value for key, value in (step or {}).items() if key != "trim_offsets"} for step in steps]
