"""Hangs and disagreements among named operations: every rank's error names the culprit and the operation."""

import pytest
from tests.support.hangs import KINDS, Case, check


@pytest.mark.parametrize("kind", KINDS)
def test_the_culprit_is_named(kind: str) -> None:
    check(Case.of(kind, seed=1))
