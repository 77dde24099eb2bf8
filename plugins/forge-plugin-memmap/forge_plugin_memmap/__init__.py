"""Pre-tokenised data for Forge: dataset `memmap`, tokenizer `prepared`, and the command `forge-run prepare-data`, which
writes what they read.

Reading: `paths` finds files, `prepared` knows the folders of `prepare-data`, `shards` reads headers of files, `corpus`
puts them together with all that can be wrong before anything is read, `documents` reads them.
"""

from forge_plugin_memmap.memmap import Memmap
from forge_plugin_memmap.prepared_tokenizer import PreparedTokenizer

__all__ = ["Memmap", "PreparedTokenizer"]
