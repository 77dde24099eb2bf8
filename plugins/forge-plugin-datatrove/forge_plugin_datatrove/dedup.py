"""The work of `data dedup`: by MinHash, texts, sentences, passages or a Bloom filter, by datatrove's own stages."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import define, frozen
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import (
    ESDatasetToSequence,
    ESMergeSequences,
    ESRangeRemover,
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
    SentDedupConfig,
    SentenceDedupFilter,
    SentenceDedupSignature,
    SentenceFindDedups,
    SingleBloomFilter,
)
from datatrove.pipeline.dedup.bloom_filter import BloomFilterConfig
from datatrove.utils.hashing import HashConfig
from datatrove.utils.typeshelper import Languages

from forge_core.config.tree import Node
from forge_core.contracts.errors import Problem, did_you_mean
from forge_plugin_datatrove.accounting import RANGES, Accounted
from forge_plugin_datatrove.execution import WORK, Phase, Work, document_writer, statistics_of
from forge_plugin_datatrove.filtering import common_arguments, counts, plain_option, reader, removals, source_inputs
from forge_plugin_datatrove.hashes import demand_hashes
from forge_plugin_datatrove.memory import (
    MemoryGuard,
    Need,
    clusters_need,
    demand_room,
    sequences_need,
    signatures_need,
)
from forge_plugin_datatrove.options import placed, read_options
from forge_plugin_datatrove.steps import demand
from forge_plugin_datatrove.substrings import (
    RepeatedRanges,
    Repeats,
    SubstringRemover,
    tokenizer_fault,
    tokenizer_identity,
)
from forge_plugin_datatrove.table import Table

SIMILARITIES = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Of pairs whose chance of being found is printed."""
GIVEN = (
    *("index_folder", "output_folder", "only_dedup_in_index"),
    *("content_getter", "document_priority", "expected_elements", "sequence_folder"),
)
"""Parameters that a table does not have: an index of another corpus, functions, and one that leads astray."""
POSITIVE = frozenset({"n_grams", "n_sentences", "num_buckets", "hashes_per_bucket", "workers_per_bucket", "min_tokens"})
"""Options that are at least 1: datatrove fails with others, or finds nothing."""
TOKENIZER = "tokenizer_name_or_path"
"""Option of datatrove's steps that make tokens."""
SAME_RESULT = frozenset({"lines_to_buffer"})
"""Options that change speed and memory alone: a command continues with another value."""


@define
class Words:
    """Options of methods that split texts into words."""

    language: str = Languages.english


@define
class Merging:
    """Options of the phase that merges signatures."""

    lines_to_buffer: int = 5


@define
class Buckets:
    """Options of MinHash's second phase, and of what it leaves in documents."""

    workers_per_bucket: int = 1
    cluster_ids: bool = False


@frozen
class Build:
    """What a method makes its phases of."""

    table: Table
    work: Callable[[str], str]
    """The path of a folder for a phase's files."""
    read: Callable[[], PipelineStep]
    keep: Callable[..., list[PipelineStep]]
    """Returns the steps that record what a step removes, and write what it keeps."""

    def guard(self, phase: str, need: Callable[..., Need], *arguments: Any) -> MemoryGuard:
        """The step that compares a phase's memory with the machine's."""
        # A partial function, and no other, can be given to processes of the pool
        return MemoryGuard(phase=phase, need=partial(need, *arguments), limit_gb=self.table.cleaning.memory_gb)

    def merging(self, phase: str, tasks: int, lines: int, line_bytes: int) -> MemoryGuard:
        """`guard` of a phase of several tasks that merge signatures."""
        # A task of SLURM has its own control group
        workers = 1 if self.table.cleaning.slurm else min(self.table.workers(), tasks)
        return self.guard(phase, signatures_need, self.work("signatures"), lines, line_bytes, workers)


def minhash(build: Build, options: Sequence[Mapping[str, Any]]) -> list[Phase]:
    """MinHash: signatures, pairs in each bucket, clusters of pairs, and one document of each cluster kept."""
    config_options, words, merging_options, bucket_options = options
    config, merging, buckets = MinhashConfig(**config_options), Merging(**merging_options), Buckets(**bucket_options)
    tasks, lines = build.table.cleaning.tasks, merging.lines_to_buffer
    line_bytes = struct.calcsize(f"<{config.hashes_per_bucket}{config.hash_config.struct_format}I")
    signatures, pairs, clusters = map(build.work, ("signatures", "pairs", "clusters"))
    find = MinhashDedupBuckets(signatures, pairs, config=config, lines_to_buffer=lines)
    # Several buckets may find the same pair, which a cluster has once
    join = MinhashDedupCluster(pairs, clusters, config=config, save_cluster_id=buckets.cluster_ids)
    remove = MinhashDedupFilter(clusters, load_cluster_ids=buckets.cluster_ids)
    # datatrove demands a multiple of the buckets
    finders = config.num_buckets * buckets.workers_per_bucket
    return [
        Phase("1-signatures", [build.read(), MinhashDedupSignature(signatures, config=config, **words)], tasks),
        Phase("2-buckets", [build.merging("2-buckets", finders, lines, line_bytes), find], finders),
        Phase("3-clusters", [build.guard("3-clusters", clusters_need, signatures, pairs, line_bytes), join], 1),
        Phase("4-filter", [build.read(), *build.keep(remove, ["minhash_cluster_id"])], tasks),
    ]


def text_of(document: Document) -> str:
    """What exact deduplication compares."""
    return document.text


def exact(build: Build, options: Sequence[Mapping[str, Any]]) -> list[Phase]:
    """Exact: documents whose texts have the same hash."""
    [hashes, merging_options] = options
    # By a function of this module, which processes of the pool can import
    config = ExactDedupConfig(content_getter=text_of, hash_config=HashConfig(**hashes))
    lines = Merging(**merging_options).lines_to_buffer
    signatures, pairs = map(build.work, ("signatures", "pairs"))
    find = ExactFindDedups(signatures, pairs, config=config, lines_to_buffer=lines)
    guard = build.merging("2-find", 1, lines, struct.calcsize(f"<{config.hash_config.struct_format}HI"))
    tasks = build.table.cleaning.tasks
    return [
        Phase("1-signatures", [build.read(), ExactDedupSignature(signatures, config=config)], tasks),
        Phase("2-find", [guard, find], 1),
        Phase("3-filter", [build.read(), *build.keep(ExactDedupFilter(pairs, config=config))], tasks),
    ]


def sentences(build: Build, options: Sequence[Mapping[str, Any]]) -> list[Phase]:
    """By sentences (C4): all but the first of equal spans of sentences are cut out, and the rest may be too short."""
    config_options, words, merging_options = options
    config = SentDedupConfig(**config_options)
    lines = Merging(**merging_options).lines_to_buffer
    signatures, pairs = map(build.work, ("signatures", "pairs"))
    find = SentenceFindDedups(signatures, pairs, config=config, lines_to_buffer=lines)
    guard = build.merging("2-find", 1, lines, struct.calcsize(f"<{config.hash_config.struct_format}IH"))
    tasks = build.table.cleaning.tasks
    return [
        Phase("1-signatures", [build.read(), SentenceDedupSignature(signatures, config=config, **words)], tasks),
        Phase("2-find", [guard, find], 1),
        Phase("3-filter", [build.read(), *build.keep(SentenceDedupFilter(pairs, config=config, **words))], tasks),
    ]


def bloom(build: Build, options: Sequence[Mapping[str, Any]]) -> list[Phase]:
    """A Bloom filter: documents most of whose n-grams were met before, in one task and in the order of the inputs."""
    config_options, words = options
    config = BloomFilterConfig(**config_options)
    # datatrove makes it of a list with an integer of 8 bytes for each, and the process that works has a copy
    why = f"a filter of {config.m_bytes:,} bytes, ten times while it is made"
    need = Need(bytes=10 * config.m_bytes, files=0, why=why, fix="a smaller m_bytes")
    demand_room("1-filter", need, build.table.cleaning.memory_gb)
    step = SingleBloomFilter(build.work("filter"), config=config, **words)
    return [Phase("1-filter", [build.read(), *build.keep(step)], 1)]


def substrings(build: Build, options: Sequence[Mapping[str, Any]]) -> list[Phase]:
    """Exact substrings: passages of tokens that occur more than once are cut out; the rest may be too short."""
    removing, repeats = options
    sequences, tasks = build.work("sequences"), build.table.cleaning.tasks
    write = ESDatasetToSequence(sequences, removing["tokenizer_name_or_path"])
    guard = build.guard("2-ranges", sequences_need, sequences)
    merge = ESMergeSequences(sequences, tasks_stage_1=tasks)
    find = RepeatedRanges(sequences, Repeats(**repeats))
    remove = SubstringRemover(sequences, **removing)
    return [
        Phase("1-sequences", [build.read(), write], tasks),
        Phase("2-ranges", [guard, merge, find], 1),
        Phase("3-filter", [build.read(), *build.keep(remove, [RANGES])], tasks),
    ]


@frozen
class Method:
    """A type of `[dedup]`."""

    phases: Callable[[Build, Sequence[Mapping[str, Any]]], list[Phase]]
    targets: Sequence[Callable[..., Any]]
    """What takes its options."""


METHODS: Mapping[str, Method] = {
    "minhash": Method(minhash, (MinhashConfig, Words, Merging, Buckets)),
    "exact": Method(exact, (HashConfig, Merging)),
    "sentences": Method(sentences, (SentDedupConfig, Words, Merging)),
    "bloom": Method(bloom, (BloomFilterConfig, Words)),
    "substrings": Method(substrings, (ESRangeRemover, Repeats)),
}


def dedup_work(table: Table) -> Work:
    """Returns the work of `data dedup`.

    Raises:
        JobError: the table or an input cannot be used.
    """
    node = table.node("dedup")
    type_ = str(node.value["type"].value) if "type" in node.value else ""
    if type_ not in METHODS:
        known = ", ".join(METHODS)
        message = f"{type_!r} is no method{did_you_mean(type_, METHODS) or f'; one of {known}'}"
        demand([Problem("dedup.type", message, str(node.origin))])
    demand_hashes()
    method = METHODS[type_]
    options, problems = read_options(node, method.targets, GIVEN, table.catalog)
    # First types, then values, as a rule on a number cannot look at a text
    demand([*placed(problems, "dedup")])
    demand([*_wrong_values(node, type_, table.cleaning.download)])
    source, folder = table.source_of("dedup"), table.folder("dedup")
    inputs = source_inputs(table, source)

    def keep(step: PipelineStep, keys: Sequence[str] = ()) -> list[PipelineStep]:
        accounted = Accounted(step, removals(folder, "dedup", 1, type_), keys, "duplicate")
        return [accounted, document_writer(table, "dedup")]

    build = Build(
        table, lambda name: table.place("dedup", WORK, name), lambda: reader(table, source, inputs, folder), keep
    )
    stated = {key: plain_option(value) for part in options for key, value in part.items() if key not in SAME_RESULT}
    if type_ == "substrings":
        stated |= tokenizer_identity(stated[TOKENIZER])
    arguments = common_arguments(table) | {"type": type_, **stated}
    phases = method.phases(build, options)
    return Work(name="dedup", folder=folder, inputs=inputs, arguments=arguments, phases=phases)


def _wrong_values(node: Node, type_: str, download: bool) -> Iterator[Problem]:
    """Yields values that datatrove takes and fails with, or that give a wrong result."""
    for key, child in node.value.items():
        value, origin = child.value, str(child.origin)
        if key == "lines_to_buffer" and (value == 0 or value < -1):
            yield Problem(f"dedup.{key}", f"{value}, but must be -1 (all) or at least 1", origin)
        elif key in POSITIVE and value < 1:
            yield Problem(f"dedup.{key}", f"{value}, but must be at least 1", origin)
    if type_ == "bloom":
        yield from _wrong_bloom(node)
    if type_ == "substrings":
        yield from _wrong_tokenizer(node, download)


def _wrong_tokenizer(node: Node, download: bool) -> Iterator[Problem]:
    """Yields why the tokens of a table's tokenizer cannot be compared."""
    stated = node.value.get(TOKENIZER)
    if stated is None:
        message = "required key is missing: the path of a byte-level tokenizer.json, in whose tokens texts are compared"
        yield Problem(f"dedup.{TOKENIZER}", message, str(node.origin))
        return
    fault = ""
    if not Path(stated.value).is_file() and not download:
        fault = (
            f"would fetch {stated.value!r}, which is no file here; put the file there, or allow it by download = true"
        )
    if fault := fault or tokenizer_fault(stated.value):
        yield Problem(f"dedup.{TOKENIZER}", fault, str(stated.origin))


def _wrong_bloom(node: Node) -> Iterator[Problem]:
    """Yields options with which datatrove's Bloom filter removes documents that nothing is equal to."""
    # `hash & m_bytes` is the number of a bit: of a power of two, only two numbers are left
    if (size := node.value["m_bytes"]).value & (size.value + 1):
        near = 2 ** (size.value.bit_length() - 1) - 1
        message = f"{size.value} leaves most of the filter unused; write a power of two less 1, such as {near}"
        yield Problem("dedup.m_bytes", message, str(size.origin))
    # Computed of `expected_elements`, it would be 64 times as many: bytes are taken times 8 twice, and bits are m_bytes
    if "k" not in node.value:
        message = "required key is missing: the number of hashes, 0.7 m_bytes / (n-grams of all documents together)"
        yield Problem("dedup.k", message, str(node.origin))


def dedup_counts(work: Work) -> dict[str, Any]:
    """Returns the body of a finished deduplication's summary."""
    summary = counts(work)
    needs = {
        phase.name: int(statistics_of(work, phase)[0].get("bytes", 0))
        for phase in work.phases
        if isinstance(phase.steps[0], MemoryGuard)
    }
    more: dict[str, Any] = {"memory": {name: total // phase_tasks(work, name) for name, total in needs.items()}}
    if work.arguments["type"] == "minhash":
        buckets = work.arguments.get("num_buckets", MinhashConfig.num_buckets)
        hashes = work.arguments.get("hashes_per_bucket", MinhashConfig.hashes_per_bucket)
        more["found"] = {str(s): chance_of(s, buckets, hashes) for s in SIMILARITIES}
    return summary | more


def phase_tasks(work: Work, name: str) -> int:
    """Tasks of a phase by its name."""
    return next(phase.tasks for phase in work.phases if phase.name == name)


def chance_of(similarity: float, buckets: int, hashes: int) -> float:
    """Returns the chance that MinHash finds two documents of a Jaccard similarity of their n-grams."""
    return float(1 - (1 - similarity**hashes) ** buckets)
