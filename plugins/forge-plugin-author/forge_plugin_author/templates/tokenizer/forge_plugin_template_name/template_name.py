"""The component template_name: its keys in a job file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core import JobError, TokenizerComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Tokenizer


@frozen(kw_only=True)
class TemplateName(TokenizerComponent):
    """One token for each of the most frequent characters of the training texts, for all others, and for end-of-text."""

    size: int = field(default=256, validator=ge(3))
    """Upper bound of the tokens, including end-of-text and the one for other characters."""

    def build(self, context: BuildContext, documents: Callable[[], Iterable[str]]) -> Tokenizer:
        from forge_plugin_template_name.characters import CharacterTokenizer

        tokenizer = CharacterTokenizer.of(documents(), self.size)
        if not tokenizer.characters:
            raise JobError("the characters are taken from the training texts, but no source has any text")
        return tokenizer

    def load(self, context: BuildContext, folder: Path) -> Tokenizer:
        from forge_plugin_template_name.characters import CharacterTokenizer

        return CharacterTokenizer.load(folder)
