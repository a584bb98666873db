"""Random cases of the adapters apart from Keras' `fit`: families that benchmarks/evidence_keras.py adds."""

from collections.abc import Sequence

from benchmarks.evidence_cases import Family

FRAMEWORKS: list[Family] = []
# For each program of the topic, the signs that only its fault can have.
SHOWS_FRAMEWORKS: dict[str, Sequence[str]] = {}
