"""Random Keras programs on several ranks against the same program in one process without multiring.

    python benchmarks/evidence_keras.py [--seconds 1800] [--seed 1] [--only FAMILY,...] [--again] [--against CHECKOUT]

The families of the other frameworks' adapters are in benchmarks/evidence_keras_frameworks.py.
"""

import sys
from collections.abc import Sequence

from benchmarks.evidence_cases import Family, Topic, main
from benchmarks.evidence_keras_frameworks import FRAMEWORKS, SHOWS_FRAMEWORKS

FAMILIES: list[Family] = [*FRAMEWORKS]
SHOWS: dict[str, Sequence[str]] = {**SHOWS_FRAMEWORKS}
TOPIC = Topic(name="keras", program="evidence_keras.py", families=FAMILIES, shows=SHOWS)

if __name__ == "__main__":
    sys.exit(main(TOPIC))
