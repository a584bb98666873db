"""Read random data sets with multiring and with the libraries that wrote them.

See benchmarks/evidence_cases.py for the options.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # lets this script import from the repository root

from benchmarks.evidence_cases import Topic, main
from benchmarks.evidence_data_files_content import CONTENT, SHOWS_CONTENT
from benchmarks.evidence_data_files_formats import FORMATS, SHOWS_FORMATS
from benchmarks.evidence_data_files_left_out import LEFT_OUT, SHOWS_LEFT_OUT
from benchmarks.evidence_data_files_running import RUNNING, SHOWS_RUNNING
from benchmarks.evidence_data_files_shards import SHARDS

TOPIC = Topic(
    name="data",
    program="evidence_data_files.py",
    families=(*FORMATS, *SHARDS, *CONTENT, *LEFT_OUT, *RUNNING),
    shows={**SHOWS_FORMATS, **SHOWS_CONTENT, **SHOWS_LEFT_OUT, **SHOWS_RUNNING},
)

if __name__ == "__main__":
    sys.exit(main(TOPIC))
