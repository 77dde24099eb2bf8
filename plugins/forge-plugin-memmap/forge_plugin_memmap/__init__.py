"""Pre-tokenised data for Forge: dataset `memmap`, tokenizer `prepared`, and the command `forge-run prepare-data`.

`prepare` writes what the dataset reads. Reading: `paths` finds files, `prepared` knows the folders of `prepare-data`,
`shards` reads headers of files, `corpus` combines them and checks all that can be checked without reading ids,
`documents` reads them.
"""

from forge_plugin_memmap.memmap import Memmap
from forge_plugin_memmap.prepared_tokenizer import PreparedTokenizer

__all__ = ["Memmap", "PreparedTokenizer"]
