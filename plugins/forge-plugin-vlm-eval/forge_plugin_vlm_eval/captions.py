"""The evaluation `captions`."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import gt

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_vlm_eval.answer_evaluation import GeneratedAnswers, mean_and_error

if TYPE_CHECKING:
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

EXTRA = 'pip install "forge-plugin-vlm-eval[captions]"'
Words = Literal["treebank", "ptb"]


@frozen(kw_only=True)
class Captions(GeneratedAnswers):
    """CIDEr of generated captions (Vedantam et al. 2015), by pycocoevalcap: words shared with the references, weighted.

    Logs `{prefix}/cider` and its standard error, `{prefix}/cider_stderr`, on the scale of papers divided by 100. It
    depends on the rows that are asked, whose references are the corpus of its weights: compare equal ones.
    """

    words: Words = "treebank"
    """What divides captions into words, compared in lower case and without punctuation. treebank: NLTK, by the
    rules of the Penn Treebank, in Python. ptb: Stanford's tokenizer, as CIDEr on COCO is reported; needs Java."""
    max_tokens: int = field(default=64, validator=gt(0))
    """Upper bound of the tokens of a caption."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the packages are installed, and Java where Stanford's tokenizer needs it."""
        yield from super().problems(job, layout)
        for package in ("pycocoevalcap", *(["nltk"] if self.words == "treebank" else [])):
            if find_spec(package) is None:
                yield Problem("", f"CIDEr needs {package}, which is not installed; {EXTRA}")
        if self.words == "ptb" and shutil.which("java") is None:
            yield Problem("words", "'ptb' runs Java, and there is no command java; install a JRE, or take 'treebank'")

    def scores(self, said: Sequence[str], right: Sequence[Sequence[str]]) -> Mapping[str, float]:
        """Raises `JobError` for fewer than two captions."""
        if len(said) < 2:
            raise JobError(
                "CIDEr weights words by how few captions have them, which one question does not tell; ask more"
            )
        return dict(mean_and_error("cider", cider(said, right, self.words)))


def cider(said: Sequence[str], right: Sequence[Sequence[str]], words: Words) -> list[float]:
    """Returns the CIDEr of each caption, given the references of all."""
    from pycocoevalcap.cider.cider import Cider

    divide = {"treebank": treebank, "ptb": ptb}[words]
    # All texts in one call: `ptb` starts Java for each
    texts = iter(divide([text for one, every in zip(said, right, strict=True) for text in (one, *every)]))
    # pycocoevalcap takes texts by a key, and returns scores in the order of its keys
    captions, references = dict[int, list[str]](), dict[int, list[str]]()
    for number, every in enumerate(right):
        captions[number] = [next(texts)]
        references[number] = [next(texts) for _ in every]
    # The first result is the mean of the values, which is computed again with its error
    _, values = Cider().compute_score(references, captions)
    return [float(value) for value in values]


def treebank(texts: Sequence[str]) -> list[str]:
    """Returns texts as words in lower case with spaces between, by NLTK, without the signs that `ptb` leaves out."""
    from nltk.tokenize.treebank import TreebankWordTokenizer
    from pycocoevalcap.tokenizer.ptbtokenizer import PUNCTUATIONS

    tokenizer = TreebankWordTokenizer()
    divided = ([word.lower() for word in tokenizer.tokenize(text.lower(), convert_parentheses=True)] for text in texts)
    return [" ".join(word for word in words if word not in PUNCTUATIONS) for words in divided]


def ptb(texts: Sequence[str]) -> list[str]:
    """Returns texts as words in lower case with spaces between, by Stanford's tokenizer of pycocoevalcap."""
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    # The form of COCO's annotations, which this tokenizer takes
    lines = {number: [{"caption": text}] for number, text in enumerate(texts)}
    divided = PTBTokenizer().tokenize(lines)
    return [divided[number][0] for number in range(len(texts))]
