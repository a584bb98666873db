"""The number of connections of a rail: what a measured rate needs, what cores allow, and what all ranks agree on."""

from dataclasses import replace
from typing import Any

import pytest

from multiring._runtime.rails.connections import agreed_connections, connection_wish
from multiring._settings import Settings
from multiring._topology import TCP, Topology
from multiring.errors import LaunchError


def wish_of(bytes_per_s: float | None, cores: int, ranks: int = 1, **settings: Any) -> dict[str, Any]:
    link = replace(TCP, bandwidth_bytes_per_s=bytes_per_s or 1.0)
    known = None if bytes_per_s is None else Topology(((0,), (1,)), rails=(link,))
    return connection_wish(Settings(**settings), known, [range(cores)] * ranks)


@pytest.mark.parametrize(
    ("bytes_per_s", "cores", "ranks", "want"),
    [
        (None, 64, 1, 1),  # nothing was measured
        (125e6, 64, 1, 1),
        (1.25e9, 64, 1, 1),
        (3.125e9, 16, 1, 2),
        (12.5e9, 16, 1, 4),
        (50e9, 64, 1, 4),
        (12.5e9, 2, 1, 1),  # no core is free
        (12.5e9, 16, 4, 3),
        (12.5e9, 4, 8, 1),
    ],
)
def test_as_many_as_the_rate_needs_and_the_cores_allow(
    bytes_per_s: float | None, cores: int, ranks: int, want: int
) -> None:
    assert agreed_connections([wish_of(bytes_per_s, cores, ranks)] * 3, 1) == want


def test_the_host_with_the_fewest_cores_decides() -> None:
    assert agreed_connections([wish_of(12.5e9, 16), wish_of(12.5e9, 4)], 1) == 3
    assert agreed_connections([wish_of(None, 16, connections=0), wish_of(None, 4, connections=0)], 1) == 3


def test_a_number_that_is_asked_for_is_used() -> None:
    assert agreed_connections([wish_of(None, 1, connections=5)] * 2, 1) == 5


def test_different_numbers_are_refused() -> None:
    wishes = [wish_of(None, 1, connections=2), wish_of(None, 1), wish_of(None, 1, connections=2)]
    with pytest.raises(LaunchError, match=r"it is 2 on ranks \[0, 2\]; not set on ranks \[1\]$"):
        agreed_connections(wishes, 1)


@pytest.mark.parametrize(
    ("engine", "rails", "text"), [("mpi", 1, "the engine is mpi"), ("auto", 2, "there are 2 rails")]
)
def test_where_there_is_one_connection_several_are_refused(engine: str, rails: int, text: str) -> None:
    with pytest.raises(LaunchError, match=f"MULTIRING_CONNECTIONS=3, but {text}.*want 1, or leave it unset"):
        agreed_connections([wish_of(None, 16, connections=3, engine=engine)] * 2, rails)
    for asked in (None, 0, 1):
        assert agreed_connections([wish_of(12.5e9, 16, connections=asked, engine=engine)] * 2, rails) == 1
