"""Collect the random cases on data sets in use, from loaders to staging.

`RUNNING` holds the families, and `SHOWS_RUNNING` the signs of known faulty programs. The program
benchmarks/evidence/data_files/main.py runs the families.
"""

from collections.abc import Mapping, Sequence

from benchmarks.evidence.data_files.caches import cleaning, staging
from benchmarks.evidence.data_files.loaders import loaders, places
from benchmarks.evidence.support.cases import Family

RUNNING: Sequence[Family] = (
    Family(name="loaders", run=loaders, deadline_s=60.0),
    Family(name="places", run=places, deadline_s=60.0),
    Family(name="cleaning", run=cleaning),
    Family(name="staging", run=staging),
)
SHOWS_RUNNING: Mapping[str, Sequence[str]] = {
    "data_19_stage_exit_status.py": ("stage: an exit code that is not so",),
    "reader_16.py": ("clean: removed what no cache wrote",),
    "reader_07.py": ("loader: rows of other samples with place",),
    "reader_23.py": (
        "loader: a hang with errors",
        "loader: a hang with iterators",
        "loader: a hang with close",
    ),
}
