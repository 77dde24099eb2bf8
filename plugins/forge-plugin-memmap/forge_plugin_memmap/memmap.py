"""Dataset `memmap`: files of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from attrs import Attribute, field, frozen
from attrs.validators import ge, optional

from forge_core.contracts.components import DatasetComponent, FilePath, when_resumed
from forge_core.contracts.errors import JobError, Problem
from forge_kit.tools.rank_zero import from_rank0, is_checked_elsewhere
from forge_plugin_memmap.corpus import CorpusKeys, ShardedCorpus, find_corpus
from forge_plugin_memmap.formats.auto import Auto
from forge_plugin_memmap.formats.kind import TokenFormat
from forge_plugin_memmap.remote import is_remote
from forge_plugin_memmap.shards import Shard, check_visible

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Documents, Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_memmap.documents import ShardedDocuments


def _off_or_at_least_two(_: Any, attribute: Attribute, value: int) -> None:
    # With 1, every document would be held out
    if value < 0 or value == 1:
        raise ValueError(f"{attribute.name!r} must be 0 (off) or at least 2, not {value}")


@frozen(kw_only=True)
class Memmap(DatasetComponent):
    """Documents that are token ids already: of `forge-run data prepare`, or of another library, read where they lie.

    Several files are one corpus, in the order of their names. Memory does not grow with the corpus. The format of a
    file is recognised by its header or its index, or stated here; it is never guessed.
    """

    path: FilePath | tuple[FilePath, ...]
    """Files, folders and globs (`data/*.npy`): one, or a list. Relative ones start at the current directory. The folder
    of `data prepare` stands for both of its splits."""
    format: TokenFormat = field(factory=Auto)
    """How ids lie in the files. By default each file shows it, by its first bytes or the index beside it."""
    end_of_text: int | None = field(default=None, validator=optional(ge(0)))
    """Id that ends a document; required where the files do not say."""
    held_out_path: FilePath | tuple[FilePath, ...] = ()
    """Files whose documents are held out, given like `path`; by default those that `data prepare` held out."""
    held_out_every: int = field(default=0, validator=_off_or_at_least_two)
    """Hold out every n-th document, starting with the first; 0: none. Without a document index (`.ends`) beside them,
    files are searched for `end_of_text` once."""
    verify: Literal["sizes", "full"] = field(default="sizes", metadata=when_resumed("safe"))
    """How files of `data prepare` are checked: by their sizes, or also by SHA-256, which detects flipped bytes."""
    remote_cache_gb: float = field(default=16.0, validator=ge(0.01), metadata=when_resumed("safe"))
    """Disk of each machine for blocks of files in object stores and on web servers, in 10^9 bytes, in `FORGE_CACHE`.
    All runs of a machine with the same number share it, and it never grows beyond."""
    _checked: ShardedCorpus | None = field(default=None, init=False, eq=False, repr=False)
    """Result of `problems`, until `build` takes it, so that no file is looked at twice: of 10,000 shards on 512 ranks
    each look is five million messages to the file system's server. Not a key of the table."""

    def corpus(self) -> ShardedCorpus:
        """The files, by their headers.

        Raises:
            JobError: every problem, with paths relative to this table.
        """
        # Before the files, since these keys decide how files are read
        if problems := list(self._key_problems()):
            raise JobError(problems)
        corpus = find_corpus(CorpusKeys(_listed(self.path), _listed(self.held_out_path), self.format, self.end_of_text))
        if problems := list(self._split_problems(corpus)):
            raise JobError(problems)
        return corpus

    def left_out(self) -> Mapping[str, int]:
        """See `forge_kit.data.data_files.ListsFiles`."""
        return (self._checked or self.corpus()).left_out

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the files by their headers, on rank 0, and their vocabulary against the model's."""
        if is_checked_elsewhere():
            yield from self._key_problems()
            return
        try:
            corpus = self.corpus()
        except JobError as error:
            yield from error.problems
            return
        self._keep(corpus)
        limit = _model_vocabulary(job)
        if limit and corpus.vocab_size is not None and corpus.vocab_size > limit:
            message = f"the files are of a tokenizer with {corpus.vocab_size} ids, but model.vocab_size = {limit}"
            yield Problem("path", f"{message}; set it to at least that")

    def build(self, context: BuildContext) -> Documents:
        """The documents.

        Raises:
            JobError: they do not fit the tokenizer or the model, or are damaged.
        """
        from forge_plugin_memmap.block_cache import block_cache
        from forge_plugin_memmap.documents import ShardedDocuments
        from forge_plugin_memmap.unpacking import unpacked

        tokenizer = context.tokenizer
        # The model's, if it has one: ids beyond it would be read outside of its embedding.
        limit = _model_vocabulary(context.job) or (tokenizer.vocab_size if tokenizer is not None else None)
        # Collective: all ranks must reach it, with problems or without
        corpus = from_rank0(context, lambda: self._checked_corpus(tokenizer, limit))
        # On every rank: another machine may have mounted other files at this path
        check_visible(corpus.shards)
        # Each machine has its own cache, where one rank makes it and the others wait
        shards = unpacked(corpus.shards)
        train, apart = shards[: len(corpus.train)], shards[len(corpus.train) :]
        size = int(self.remote_cache_gb * 1e9)
        # Now, so that a disk without the room is no error of the middle of the run
        if any(is_remote(shard.path) for shard in shards):
            block_cache(size)
        held_out = ShardedDocuments(apart, corpus.end_of_text, None, limit, size) if apart else None
        return self._split(train, ShardedDocuments(train, corpus.end_of_text, held_out, limit, size))

    def _checked_corpus(self, tokenizer: Tokenizer | None, limit: int | None) -> ShardedCorpus:
        """Returns the files; raises `JobError` if they do not fit the tokenizer or the model, or are damaged."""
        from forge_plugin_memmap.ids import id_problems
        from forge_plugin_memmap.unpacking import unpacked

        corpus = self._checked or self.corpus()
        self._keep(None)  # a later build looks again
        problems = [] if tokenizer is None else list(_tokenizer_problems(corpus, tokenizer))
        problems += [*self._damage(corpus), *id_problems(unpacked(corpus.shards), limit)]
        if problems:
            raise JobError(problems)
        return corpus

    def _keep(self, corpus: ShardedCorpus | None) -> None:
        object.__setattr__(self, "_checked", corpus)  # the component is frozen, as its keys must not change

    def _split(self, shards: Sequence[Shard], documents: ShardedDocuments) -> Documents:
        if not self.held_out_every:
            return documents
        from forge_plugin_memmap.selection import split_documents

        identity = [documents.end_of_text, *(shard.cache_key() for shard in shards)]
        return split_documents(documents, self.held_out_every, identity)

    def _damage(self, corpus: ShardedCorpus) -> Iterator[Problem]:
        for prepared in corpus.prepared if self.verify == "full" else ():
            for name in prepared.manifest["files"]:
                if fault := prepared.digest_fault(name):
                    yield Problem("", fault)

    # --- problems --------------------------------------------------------------------------------------------------

    def _key_problems(self) -> Iterator[Problem]:
        if not _listed(self.path) or not all([*_listed(self.path), *_listed(self.held_out_path)]):
            yield Problem("path", "an empty path names nothing; give a file, folder or glob, or a list")
        if self.held_out_every and self.held_out_path:
            yield Problem(
                "held_out_path", f"held_out_every = {self.held_out_every} is set as well; keep one of the two"
            )

    def _split_problems(self, corpus: ShardedCorpus) -> Iterator[Problem]:
        if self.held_out_every and corpus.held_out:
            count = len(corpus.held_out)
            yield Problem("held_out_every", f"data prepare held out {count} files already; leave this key out")
        if self.verify == "full" and not corpus.prepared:
            yield Problem("verify", '"full", but only what data prepare wrote has a SHA-256 to compare with')


def _listed(path: str | tuple[str, ...]) -> tuple[str, ...]:
    return (path,) if isinstance(path, str) else tuple(path)


def _model_vocabulary(job: Job) -> int:
    """The key `vocab_size` of the model; 0 where it has none, or takes the tokenizer's."""
    return getattr(job.model, "vocab_size", 0) or 0


def _tokenizer_problems(corpus: ShardedCorpus, tokenizer: Tokenizer) -> Iterator[Problem]:
    """How the job's tokenizer is not the one that made the files, where these record it."""
    for prepared in corpus.prepared:
        if prepared.fingerprint != tokenizer.fingerprint():
            message = f"{prepared.folder} was made with a tokenizer other than [data.tokenizer]"
            yield Problem("", f'{message}; set type = "prepared" and path = "{prepared.folder}" there')
    # Their fingerprints were compared, which is the stricter check
    if corpus.prepared:
        return
    where = corpus.train[0].path
    if corpus.end_of_text != tokenizer.end_of_text:
        message = f"{where}: documents end with id {corpus.end_of_text}, but [data.tokenizer] ends them with"
        yield Problem("", f"{message} {tokenizer.end_of_text}; correct end_of_text, or use the tokenizer of the files")
    if corpus.vocab_size not in (None, tokenizer.vocab_size):
        message = f"{where} was made with a tokenizer of {corpus.vocab_size} ids, but [data.tokenizer] has"
        yield Problem("", f"{message} {tokenizer.vocab_size}; use the tokenizer of the files")
