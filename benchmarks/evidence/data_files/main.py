"""Read random data sets with multiring and with the libraries that wrote them.

    python benchmarks/evidence/data_files/main.py [--seconds 1800] [--seed 1] [--only FAMILY,...] [--against CHECKOUT]

See benchmarks/evidence/support/cases.py for the options.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.data_files.content import CONTENT, SHOWS_CONTENT
from benchmarks.evidence.data_files.formats import FORMATS, SHOWS_FORMATS
from benchmarks.evidence.data_files.left_out import LEFT_OUT, SHOWS_LEFT_OUT
from benchmarks.evidence.data_files.running import RUNNING, SHOWS_RUNNING
from benchmarks.evidence.data_files.shards import SHARDS
from benchmarks.evidence.support.cases import Topic, main

TOPIC = Topic(
    name="data",
    program="evidence/data_files/main.py",
    families=(*FORMATS, *SHARDS, *CONTENT, *LEFT_OUT, *RUNNING),
    shows={**SHOWS_FORMATS, **SHOWS_CONTENT, **SHOWS_LEFT_OUT, **SHOWS_RUNNING},
)

if __name__ == "__main__":
    sys.exit(main(TOPIC))
