"""Base of the datasets of this distribution: the split, the token files and the problems of a corpus."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import evolve, frozen

from forge_core.contracts.components import DatasetComponent, FilePath, when_resumed
from forge_core.contracts.errors import JobError, Problem
from forge_kit.data.tar_groups import tar_groups
from forge_kit.tools.rank_zero import from_rank0, is_checked_elsewhere
from forge_plugin_text.corpus import CorpusFacts, TextCorpus
from forge_plugin_text.listing import TAR, TextFile
from forge_plugin_text.reading import Reading
from forge_plugin_text.split import Split, read_names

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Documents
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


def _off_or_at_least_two(_: Any, attribute: attrs.Attribute, value: int) -> None:
    if value < 0 or value == 1:
        raise ValueError(f"{attribute.name!r} must be 0 (off) or at least 2, not {value}")


@frozen(kw_only=True)
class CorpusDataset(DatasetComponent):
    """Sequences of a corpus in files, tokenised once and cached."""

    held_out_every: int = attrs.field(default=0, validator=_off_or_at_least_two)
    """Hold out every n-th document, starting with the first, in the order of names; 0: none."""
    held_out_list: FilePath = ""
    """File that names the documents to hold out, one a line (`#` starts a comment line); empty: none. Names that the
    corpus does not have are ignored if it has at least one."""
    verify: Literal["sizes", "full"] = attrs.field(default="sizes", metadata=when_resumed("safe"))
    """How cached token files are checked: by their sizes, or also by SHA-256, which detects flipped bytes."""
    _facts: CorpusFacts | None = attrs.field(default=None, init=False, eq=False, repr=False)
    """Result of the last `build`, for `facts`: each file is looked at once per start. Not a key of the table."""

    def files(self) -> tuple[TextFile, ...]:
        """Returns the files of the corpus, sorted by name; at least one.

        Raises:
            JobError: there are none; the paths of its problems are relative to this component's table.
        """
        raise NotImplementedError

    def left_out(self) -> Mapping[str, int]:
        """See `forge_kit.data.data_files.ListsFiles`."""
        return {}

    def reading(self) -> Reading:
        """Returns the settings for reading the files."""
        return Reading()

    def corpus(self) -> TextCorpus:
        """Returns the documents and their split.

        Raises:
            JobError: there are no files, or the held-out list does not exist.
        """
        files = self.files()
        if problems := list(self._split_problems(files)):
            raise JobError(problems)
        names = read_names(self._list_path) if self.held_out_list else frozenset[str]()
        return TextCorpus(files, self.reading(), Split(self.held_out_every, names))

    def documents(self) -> Iterator[str]:
        """Yields texts of the documents that are not held out."""
        return (document.text for document, held_out in self.corpus().documents() if not held_out)

    def build(self, context: BuildContext) -> Documents:
        """Returns the tokenised documents, from the cache.

        Raises:
            JobError: the corpus cannot be read, or changes while it is read.
        """
        if context.tokenizer is None:
            raise JobError(_NO_TOKENIZER)
        from forge_plugin_text.tokens import cached_tokens, open_documents

        # Called on rank 0 for the facts, and elsewhere only by a rank that encodes
        find_corpus = functools.cache(self.corpus)
        # Collective: all ranks must reach this call
        facts = from_rank0(context, lambda: evolve(find_corpus().describe(), left_out=self.left_out()))
        object.__setattr__(self, "_facts", facts)  # the component is frozen, as its keys must not change
        stored = cached_tokens(facts, find_corpus, context.tokenizer, self.verify)
        return open_documents(stored, facts, find_corpus)

    def facts(self) -> CorpusFacts:
        """Returns the facts of the last `build`; looks at all files if there was none."""
        return self._facts or evolve(self.corpus().describe(), left_out=self.left_out())

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that there are a tokenizer, files, and a split that they allow; on other ranks the tokenizer only."""
        if job.data.tokenizer is None:
            yield Problem("", _NO_TOKENIZER)
        if is_checked_elsewhere():
            return
        try:
            files = self.files()
        except JobError as error:
            yield from error.problems
            files = ()
        yield from self._split_problems(files)
        for file in files:
            if file.format == TAR:
                yield from _tar_problems(file.path)

    @property
    def _list_path(self) -> Path:
        return Path(self.held_out_list)

    def _split_problems(self, files: Collection[TextFile]) -> Iterator[Problem]:
        if self.held_out_list and self.held_out_every:
            yield Problem(
                "held_out_list", f"held_out_every = {self.held_out_every} is set as well; keep one of the two"
            )
        elif self.held_out_list:
            yield from self._list_problems(files)
        elif self.held_out_every and len(files) == 1 and self._is_single(tuple(files)):
            message = f"{self.held_out_every}, but the corpus is a single document, which cannot be split; "
            yield Problem("held_out_every", message + "divide it into several files, or set held_out_every = 0")

    def _is_single(self, files: tuple[TextFile, ...]) -> bool:
        """Whether one file is one document; of JSON lines, two at the most are read."""
        if files[0].format not in (".jsonl", TAR):
            return True
        try:
            return len(list(islice(self.reading().documents(files[0]), 2))) == 1
        except JobError:  # a line that cannot be read; named when the corpus is
            return False

    def _list_problems(self, files: Collection[TextFile]) -> Iterator[Problem]:
        path = self._list_path
        try:
            names = read_names(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = f"{error.strerror or error}, looked from {Path.cwd()}" if isinstance(error, OSError) else error
            yield Problem(
                "held_out_list", f"{str(path)!r} cannot be read ({reason}); correct the path or make the list"
            )
            return
        if not names:
            yield Problem("held_out_list", f"{str(path)!r} names no document; write one name a line")
            return
        listed = names | {name.rpartition(":")[0] for name in names}  # `data/a.jsonl:17` is a line of `data/a.jsonl`
        if files and not any(file.name in listed for file in files):
            example = next(iter(files)).name
            message = f"none of the {len(names)} names in {str(path)!r} is in the corpus, e.g. {min(names)!r}; "
            yield Problem("held_out_list", message + f"names look like {example!r} there")


def _tar_problems(path: str) -> Iterable[Problem]:
    """Yields a problem if an archive was cut short. Its headers are read, as nothing else shows that."""
    try:
        tar_groups(path)
    except JobError as error:
        yield from (problem.below("path") for problem in error.problems)


_NO_TOKENIZER = 'text needs a tokenizer; add a table [data.tokenizer], for example with type = "bpe"'
