"""The steps of datatrove that a table may name, and what each needs: packages, files from the internet."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from forge_core.config.tree import Node
from forge_core.contracts.errors import JobError, Problem, did_you_mean
from forge_core.plugins.catalog import Catalog
from forge_plugin_datatrove.options import placed, read_options

if TYPE_CHECKING:
    from datatrove.pipeline.base import PipelineStep

FILTERS: Mapping[str, str] = {
    "c4_bad_words": "datatrove.pipeline.filters:C4BadWordsFilter",
    "c4_paragraph": "datatrove.pipeline.filters:C4ParagraphFilter",
    "c4_quality": "datatrove.pipeline.filters:C4QualityFilter",
    "fasttext": "datatrove.pipeline.filters:FastTextClassifierFilter",
    "fineweb_quality": "datatrove.pipeline.filters:FineWebQualityFilter",
    "ftfy": "datatrove.pipeline.formatters:FTFYFormatter",
    "gopher_quality": "datatrove.pipeline.filters:GopherQualityFilter",
    "gopher_repetition": "datatrove.pipeline.filters:GopherRepetitionFilter",
    "language": "datatrove.pipeline.filters:LanguageFilter",
    "pii": "datatrove.pipeline.formatters:PIIFormatter",
    "regex": "datatrove.pipeline.filters:RegexFilter",
    "sampler": "datatrove.pipeline.filters:SamplerFilter",
    "symbol_lines": "datatrove.pipeline.formatters:SymbolLinesFormatter",
    "unigram_log_probs": "datatrove.pipeline.filters:UnigramLogProbFilter",
    "url": "datatrove.pipeline.filters:URLFilter",
}
"""Steps of `[[filter]]`. Formatters change texts and remove no document."""
STATISTICS: Mapping[str, str] = {
    "contamination": "datatrove.pipeline.stats:WordsContaminationStats",
    "documents": "datatrove.pipeline.stats:DocStats",
    "language": "datatrove.pipeline.stats:LangStats",
    "lines": "datatrove.pipeline.stats:LineStats",
    "paragraphs": "datatrove.pipeline.stats:ParagraphStats",
    "sentences": "datatrove.pipeline.stats:SentenceStats",
    "tokens": "datatrove.pipeline.stats:TokenStats",
    "words": "datatrove.pipeline.stats:WordStats",
}
"""Steps of `[[stats]]`."""


@frozen
class Step:
    """A step that a table names, with the options that it states."""

    type: str
    make: Callable[..., PipelineStep]
    options: Mapping[str, Any]

    def build(self, **more: Any) -> PipelineStep:
        """Makes datatrove's object."""
        return self.make(**self.options, **more)


def read_step(
    node: Node, path: str, types: Mapping[str, str], catalog: Catalog, download: bool, **more: Any
) -> tuple[Step | None, list[Problem]]:
    """Read the table of a step, and make it once, so that a wrong value is found before anything runs.

    Args:
        node: the table.
        path: where it is in the file.
        types: what its `type` may be.
        catalog: of components.
        download: whether steps may fetch files from the internet.
        more: arguments of the step that are not in the table.

    Returns:
        The step, or None with the problems.
    """
    target, problems = step_class(node, path, types)
    if target is None:
        return None, problems
    # Parameters that the command passes are unknown keys in the table
    [options], problems = read_options(node, [target], [*more], catalog)
    origin = str(node.origin)
    problems = [*placed(problems, path)]
    if not problems:
        step = Step(node.value["type"].value, target, options)
        problems = [Problem(path, message, origin) for message in _faults(step, download, more)]
        if not problems:
            return step, []
    return None, problems


def step_class(node: Node, path: str, types: Mapping[str, str]) -> tuple[Any, list[Problem]]:
    """Returns the class that `type` names, one of `types` or `my_module:MyStep`; or None with the problem."""
    name = node.value["type"].value if "type" in node.value else None
    place = f"{path}.type"
    if not isinstance(name, str):
        return None, [Problem(place, f"required key is missing; one of {', '.join(types)}", str(node.origin))]
    origin = str(node.value["type"].origin)
    if name not in types and ":" not in name:
        message = f"{name!r} is no step here{did_you_mean(name, types) or '; one of ' + ', '.join(types)}"
        return None, [Problem(place, f'{message}; your own is "my_module:MyStep"', origin)]
    # Only the modules of steps that a table names are imported
    module, _, attribute = types.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        return None, [Problem(place, f"{name} cannot be imported: {error}", origin)]
    # A function is callable too, but its parameters are the documents
    if not inspect.isclass(found):
        return None, [Problem(place, f"{name} is no class of a datatrove step", origin)]
    return found, []


def _faults(step: Step, download: bool, more: Mapping[str, Any]) -> Iterator[str]:
    """Yields why a step cannot be used: files that it would fetch, packages that are missing, values it refuses."""
    try:
        fetched = None if download else _fetched(step)
        if fetched is None:
            step.build(**more)
    except ImportError as error:
        # datatrove's message has the line that installs them
        yield str(error)
    # Anything: constructors of datatrove, and of users' own steps, compile patterns and open files
    except Exception as error:
        yield f"{step.type} refuses its options: {error or type(error).__name__}"
    else:
        if fetched is not None:
            yield f"{step.type} would fetch {fetched}; put the file there, or allow it by download = true"


def _fetched(step: Step) -> str | None:
    """Returns what the step would fetch from the internet when it runs, and where it is looked for before."""
    if step.type == "fasttext":
        model = str(step.options["model_url"])
        return None if Path(model).is_file() else f"its model from {model}, which is no file here"
    if step.type == "tokens":
        name = str(step.options.get("tokenizer_name_or_path", "gpt2"))
        return None if Path(name).is_file() else f"the tokenizer {name!r}, which is no file here"
    if step.type == "language":
        from datatrove.utils.lid import FT176LID, GlotLID

        model = GlotLID if step.options.get("backend") == "glotlid" else FT176LID
        return _missing(str(model.MODEL_URL), "lid", str(model.MODEL_SUBFOLDER))
    if step.type == "c4_bad_words":
        from datatrove.pipeline.filters import c4_filters

        return _missing(c4_filters._EN_BADWORDS_URL, "filters", "c4_badwords")
    if step.type == "unigram_log_probs":
        from datatrove.pipeline.filters.unigram_log_probs import UNIGRAM_DOWNLOAD

        return _missing(UNIGRAM_DOWNLOAD, "filters", "unigram_logprob_filter", UNIGRAM_DOWNLOAD.rpartition("/")[2])
    return _language_model(step)


def _language_model(step: Step) -> str | None:
    """Returns the model that splits words of the step's language, if it is one of those that are fetched."""
    parameters = inspect.signature(step.make).parameters
    if "language" not in parameters:
        return None
    from datatrove.utils.word_tokenizers import StanzaTokenizer, load_word_tokenizer

    # spaCy's rules come with it, while Stanza fetches a model of the language when it first splits a text
    language = step.options.get("language", parameters["language"].default)
    return f"Stanza's model of {language}" if isinstance(load_word_tokenizer(language), StanzaTokenizer) else None


def _missing(url: str, namespace: str, subfolder: str, name: str = "") -> str | None:
    """Returns the URL and the path in datatrove's cache, unless the file is there."""
    from huggingface_hub import cached_assets_path

    folder = cached_assets_path(library_name="datatrove", namespace=namespace, subfolder=subfolder)
    # By the rule of datatrove's `cached_asset_path_or_download`
    path = folder / (name or url.partition("://")[2].replace("/", "_"))
    return None if path.is_file() else f"{url} to {path}"


def demand(problems: list[Problem]) -> None:
    """Raises `JobError` if there is any problem."""
    if problems:
        raise JobError(problems)
