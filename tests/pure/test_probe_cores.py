"""Detection of ranks that share the cores of their machine."""

import pytest

from multiring._probe.measure import outnumbered

MACHINES = [b"a", b"a", b"b", b"b"]


@pytest.mark.parametrize(
    ("cores", "wanted"),
    [
        ([{0, 1}, {0, 1}, {0, 1}, {0, 1}], False),
        ([{0}, {1}, {0, 1}, {0, 1}], False),
        ([{0}, {0}, {0, 1}, {0, 1}], True),  # two ranks on one core of the first machine
        ([{0, 1}, {0, 1}, {3}, {3}], True),
    ],
)
def test_ranks_outnumber_the_cores_of_a_machine(cores: list[set[int]], *, wanted: bool) -> None:
    assert outnumbered(MACHINES, [frozenset(each) for each in cores]) is wanted


def test_hosts_of_one_machine_share_its_cores() -> None:
    assert outnumbered([b"a"] * 8, [frozenset({0, 1})] * 8)
