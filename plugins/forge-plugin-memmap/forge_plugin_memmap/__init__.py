"""Pre-tokenised data for Forge: dataset `memmap`, tokenizer `prepared`, and the command `forge-run data prepare`.

`prepare` writes the files that the dataset reads. For reading, `paths` finds files, `prepared` reads the manifests of
folders that `data prepare` wrote, `shards` reads headers of files, `corpus` combines them and checks everything that
can be checked without reading ids, and `documents` reads the ids.
"""

from forge_plugin_memmap.memmap import Memmap
from forge_plugin_memmap.prepared_tokenizer import PreparedTokenizer

__all__ = ["Memmap", "PreparedTokenizer"]
