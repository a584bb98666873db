"""The events of all ranks: each rank's own links, and links that ranks share, first in, first out."""

from dataclasses import replace

import pytest
from tests.support.schedules import frame_on

from multiring._collectives import build
from multiring._schedule import Collective, Schedule, Way, price
from multiring._simulator import seconds_of_all
from multiring._topology import Link
from multiring.errors import ScheduleError

PLAIN = Link(latency_s=0, overhead_s=0, bandwidth_bytes_per_s=1e9, reduce_bytes_per_s=float("inf"))
LINK = Link(latency_s=30e-6, overhead_s=4e-6, bandwidth_bytes_per_s=1e9, reduce_bytes_per_s=6e9)


def _broadcast(ranks: int) -> Schedule:
    return build("direct", frame_on(Collective.BROADCAST, (ranks,)))


def _slower(link: Link, times: float) -> Link:
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / times)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_message_is_as_slow_as_the_slower_of_its_two_ends(slow: int) -> None:
    ways = [(Way(link=PLAIN, port=0),), (Way(link=PLAIN, port=0),)]
    ways[slow] = (Way(link=_slower(PLAIN, 10), port=0),)
    assert seconds_of_all(_broadcast(2), 1e9, ways) == pytest.approx(10)


def test_one_slow_rank_slows_every_turn_of_a_ring() -> None:
    schedule = build("ring", frame_on(Collective.ALL_REDUCE, (4,)))
    ways = [(Way(link=PLAIN, port=0),)] * 4
    ways[2] = (Way(link=_slower(PLAIN, 5), port=0),)
    # Each chunk of a quarter passes rank 2 once in each half of the ring: 2 x 3 messages of 1.25 s follow each other.
    assert seconds_of_all(schedule, 1e9, ways) == pytest.approx(6 * 1.25)


def test_shared_links_serve_the_first_message_first() -> None:
    schedule = _broadcast(3)
    ways = [(Way(link=PLAIN, port=0, enters=() if rank == schedule.root else (0,)),) for rank in range(3)]
    # The first message leaves the root from 0 to 1 s, and is on the shared link until 2 s. The second one reaches this
    # link at 1 s and waits for 1 s.
    assert seconds_of_all(schedule, 1e9, ways, shared_bytes_per_s=[5e8]) == pytest.approx(4)


def test_several_slow_wires_fill_a_fast_shared_link() -> None:
    schedule = build("ring", frame_on(Collective.ALL_REDUCE, (2, 4)))
    # Both ranks of each of 4 hosts send at the same time; neither has to wait if the host's link has twice their rate.
    inside, outside = Way(link=PLAIN, port=0), Way(link=LINK, port=1)
    alone = [(inside, outside)] * 8
    hosts = [(inside, replace(outside, leaves=(rank // 2,), enters=(4 + rank // 2,))) for rank in range(8)]
    want = seconds_of_all(schedule, 8e6, alone)
    assert seconds_of_all(schedule, 8e6, hosts, shared_bytes_per_s=[2e9] * 8) == pytest.approx(want, rel=1e-12)
    # If the host's link has the rate of one rank, the second rank's messages come last, as with half of the rate each.
    # Without latency, the first rank gains nothing by coming first.
    plain = replace(outside, link=PLAIN)
    hosts = [(inside, replace(plain, leaves=(rank // 2,), enters=(4 + rank // 2,))) for rank in range(8)]
    halved = [(inside, replace(plain, link=_slower(PLAIN, 2)))] * 8
    found = seconds_of_all(schedule, 8e6, hosts, shared_bytes_per_s=[1e9] * 8)
    assert found == pytest.approx(seconds_of_all(schedule, 8e6, halved), rel=1e-9)


def test_a_slow_receiver_starts_when_a_message_that_waited_reaches_it() -> None:
    schedule = _broadcast(3)
    first, second = [rank for rank in (2, 0) if rank != schedule.root]
    ways = {
        schedule.root: (Way(link=PLAIN, port=0),),
        first: (Way(link=PLAIN, port=0, enters=(0,)),),
        second: (Way(link=_slower(PLAIN, 4), port=0, enters=(0,)),),
    }
    # The second message waits at the shared link until 2 s, and then takes 4 s on its receiver's wire.
    found = seconds_of_all(schedule, 1e9, [ways[rank] for rank in range(3)], shared_bytes_per_s=[5e8])
    assert found == pytest.approx(6)


def test_equal_ranks_with_joining_ranks_take_their_price() -> None:
    frame = replace(frame_on(Collective.ALL_REDUCE, (3,)), joined=((3, 0), (4, 1), (5, 2)))
    schedule = build("ring", frame)
    ways = (Way(link=LINK, port=1), Way(link=PLAIN, port=0))
    assert seconds_of_all(schedule, 6e6, [ways] * 6) == pytest.approx(price(schedule, 6e6, ways), rel=1e-12)


def test_ways_of_another_cluster_are_refused() -> None:
    way = Way(link=PLAIN, port=0)
    with pytest.raises(ScheduleError, match=r"ways of 2 ranks, \[1\] each: want 1 for each of 3 ranks"):
        seconds_of_all(_broadcast(3), 8, [(way,)] * 2)
    with pytest.raises(ScheduleError, match=r"ways of 3 ranks, \[1, 2\] each: want 1 for each of 3 ranks"):
        seconds_of_all(_broadcast(3), 8, [(way,), (way, way), (way,)])
    with pytest.raises(ScheduleError, match="shared link 1: want one of the 1 shared links"):
        seconds_of_all(_broadcast(3), 8, [(replace(way, leaves=(1,)),)] * 3, shared_bytes_per_s=[1e9])
