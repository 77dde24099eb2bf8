"""Text for Forge: datasets `text` and `python_stdlib`, tokenizers `bpe`, `file` and `bytes`, and packings.

From files to tokens: `listing` finds the files of a corpus, `reading` turns them into documents, `split` decides which
are held out, and `tokens` encodes them into cached token files. The subpackage `packing` has the packings `isolate` and
`best_fit`, which build sequences of documents and keep them apart.
"""

from forge_plugin_text.bpe import BPE
from forge_plugin_text.bytes import Bytes
from forge_plugin_text.file import TokenizerFile
from forge_plugin_text.listing import TextFile, find_files
from forge_plugin_text.python_stdlib import PythonStdlib
from forge_plugin_text.source import CorpusDataset
from forge_plugin_text.text import Text

__all__ = ["BPE", "Bytes", "CorpusDataset", "PythonStdlib", "Text", "TextFile", "TokenizerFile", "find_files"]
