"""Pre-tokenised data for Forge: dataset `memmap`, tokenizer `prepared`, and the command `forge-run data prepare`.

`prepare` writes the files that the dataset reads. For reading, `paths` finds files, `prepared` reads the manifests of
folders that `data prepare` wrote, `formats` recognises and describes files, `corpus` combines them and checks
everything that can be checked without reading ids, and `documents` reads the ids.
"""

from forge_plugin_memmap.formats import Candidate, TokenFormat
from forge_plugin_memmap.memmap import Memmap
from forge_plugin_memmap.prepared_tokenizer import PreparedTokenizer
from forge_plugin_memmap.shards import ListedEnds, Mask, Shard

__all__ = ["Candidate", "ListedEnds", "Mask", "Memmap", "PreparedTokenizer", "Shard", "TokenFormat"]
