"""A rank whose launcher is on another host: nobody hears of a vote, and it goes by none, before the launcher has it."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import pytest

from multiring._agreement.succession import Succession
from multiring._agreement.vote_messages import decode
from multiring._agreement.votes import Vote
from multiring._runtime.failures.generation_vote import GenerationVote, VotingProcesses
from multiring._runtime.failures.launcher_channel import ENDED, KEEP, LauncherMessage
from multiring._runtime.group.generation_end import GenerationEnd


class FarChannel:
    """A channel whose launcher keeps no vote before the test says so."""

    def __init__(self, *, is_far: bool) -> None:
        self.is_far = is_far
        self.first_messages: list[LauncherMessage] = []
        self.kept: list[Vote] = []

    def send(self, line: bytes) -> None:
        if line.startswith(KEEP.encode()):
            self.kept.append(decode(line[2:]).vote)


class SentVotes:
    """Carries messages to another rank's vote, at once."""

    def __init__(self) -> None:
        self.cut_off: Any = None
        self.sent: list[tuple[int, bytes]] = []

    def send(self, to: int, _group: int, _tag: int, part: bytes) -> None:
        self.sent.append((to, part))


def vote_of(
    rank: int, *, is_far: bool, here: Collection[int] = (), hosts: Sequence[Sequence[int]] = ((0, 1, 2),)
) -> tuple[GenerationVote, Any, Any]:
    """Return the vote of a rank, its channel and what it has sent; `here`: the processes of this host."""
    channel: Any = FarChannel(is_far=is_far)
    control: Any = SentVotes()
    end = GenerationEnd(rank, may_end=True)
    pids = {number: 1000 + number if number in here else None for each in hosts for number in each}
    return GenerationVote(control, channel, VotingProcesses(pids, hosts), end, "a job", 1), channel, control


@pytest.mark.parametrize("is_far", [False, True])
def test_nobody_hears_of_a_vote_that_the_launcher_does_not_have(*, is_far: bool) -> None:
    vote, channel, control = vote_of(0, is_far=is_far)
    vote._hear_launcher(LauncherMessage(ENDED, 2, b""))  # rank 0 leads: it promises its ballot to itself, and asks
    assert len(channel.kept) == 1
    assert bool(control.sent) != is_far
    vote._hear_launcher(LauncherMessage(KEEP, -1, b""))
    assert control.sent


def test_a_rank_goes_by_a_decision_once_the_launcher_has_its_vote() -> None:
    vote, channel, control = vote_of(0, is_far=True)
    other = Succession(1, 0, (0, 1, 2), has_referee=True)
    other.end(2, Vote(-1))
    vote._hear_launcher(LauncherMessage(ENDED, 2, b""))
    for _ in range(20):
        if channel.kept[-1].generation == 1:
            break
        while vote._confirmed < len(channel.kept):
            vote._hear_launcher(LauncherMessage(KEEP, -1, b""))
        sent, control.sent[:] = list(control.sent), []
        for to, data in sent:
            assert to == 1
            for back, answer in other.hear(0, data).sends:
                assert back == 0
                vote._do(partial(vote._succession.hear, 1, answer))
    assert channel.kept[-1] == Vote(1, (0, 1))
    decided: list[tuple[int, tuple[int, ...]]] = [vote._decided]
    vote._hear_launcher(LauncherMessage(KEEP, -1, b""))
    assert [*decided, vote._decided] == [(0, (0, 1, 2)), (1, (0, 1))]


def test_only_processes_that_share_memory_must_have_ended() -> None:
    """A process of another host that is out may still run: it can write into no memory here."""
    hosts = ((0, 1), (2, 3))
    for out, is_awaited in ((1, True), (3, False)):
        vote, _, _ = vote_of(0, is_far=False, here=(0, 1), hosts=hosts)
        left = tuple(each for each in range(4) if each != out)
        vote._decided = (1, left)
        assert (vote._found(0, range(4)) is None) == is_awaited
        vote._hear_launcher(LauncherMessage(ENDED, out, b""))
        assert vote._found(0, range(4)) == (1, left)


def test_no_rank_of_a_host_that_cannot_be_reached_is_waited_for() -> None:
    """Rank 0 has lost rank 3 only. It has no connection with rank 4, which is on the same host."""
    vote, _, control = vote_of(0, is_far=False, hosts=((0, 1, 2), (3, 4)))
    vote._doubt_host(3)
    vote.lose(3, died=True, why="a cut wire")
    others = {number: Succession(number, 0, range(5), has_referee=True) for number in (1, 2)}
    for _ in range(2):  # the others promise, and accept
        sent, control.sent[:] = list(control.sent), []
        for to, data in sent:
            for _, answer in others[to].hear(0, data).sends if to in others else ():
                vote._do(partial(vote._succession.hear, to, answer))
    assert vote._decided == (1, (0, 1, 2))  # as rank 4 would have been asked for seconds
