"""Random cases about data sets that are being fed: places and memberships, workers, caches, commands and peers.

`RUNNING` holds the families, `SHOWS_RUNNING` the signs of known programs. benchmarks/evidence_data_files.py runs them.
"""

from collections.abc import Mapping, Sequence

from benchmarks.evidence_cases import Family

RUNNING: Sequence[Family] = ()
SHOWS_RUNNING: Mapping[str, Sequence[str]] = {}
