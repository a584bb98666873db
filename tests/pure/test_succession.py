"""The agreement on the next generation: one decision, whatever is lost, and a decision soon where there can be one."""

import json
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.succession_net import SuccessionNet

from multiring._agreement import succession
from multiring._agreement.succession import PATIENCE, Succession, VoteOutcome
from multiring._agreement.vote_messages import ACCEPT, CALL, DECIDED, PROMISE, VoteMessage, decode, encode
from multiring._agreement.votes import Ballot, Vote, agreeable, are_enough

SOON = 12 * PATIENCE  # ticks until all have decided, on a network that loses nothing


def net_of(size: int, seed: int, **options: Any) -> SuccessionNet:
    return SuccessionNet(size, Random(seed), **options)  # noqa: S311 -- no secret


def settled(net: SuccessionNet) -> list[int]:
    """Let the network settle; return the processes of the last generation, which must all be in it."""
    net.settle(SOON * 6)
    last = max(net.decided)
    for member in net.alive():
        if net.nodes[member].generation < last:  # nobody has told it, and it has had no reason to ask
            net.begin(member)
    net.settle(SOON * 6)
    assert max(net.decided) == last
    for member in net.alive():
        node = net.nodes[member]
        assert node.is_out or (node.generation, node.members) == (last, net.decided[last]), member
        assert node.is_out or not node.is_voting, member
    return list(net.decided[last])


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("lost", [0, 1])
def test_survivors_go_on(size: int, lost: int) -> None:
    net = net_of(size, 0)
    net.kill(lost)
    for member in net.alive():
        net.tell_end(member, lost)
    assert settled(net) == [each for each in range(size) if each != lost]
    assert max(net.decided) == 1


@pytest.mark.parametrize("out", [0, 3])
def test_a_frozen_member_is_waited_for_equally_long_also_if_it_would_lead(out: int) -> None:
    net = net_of(5, 0, loss=0.0)
    net.frozen = {out}
    for member in set(net.nodes) - {out}:
        net.begin(member)
    for _ in range(PATIENCE + 1):
        for _ in range(10):  # all messages and their answers
            net.deliver(1_000)
        net.tick()
    for _ in range(10):
        net.deliver(1_000)
    assert net.decided[1] == tuple(each for each in range(5) if each != out)


def test_it_takes_few_messages() -> None:
    net = net_of(64, 0, loss=0.0)
    net.kill(17)
    for member in net.alive():
        net.tell_end(member, 17)
    net.settle(2)
    assert net.decided[1] == tuple(each for each in range(64) if each != 17)
    assert net.sent <= 7 * 64  # calls, questions, promises, proposals, acceptances, and the decision


def cut_in_two(net: SuccessionNet, side: list[int]) -> None:
    net.parts = dict.fromkeys(side, 1)
    for one in net.alive():
        for other in net.alive():
            if not net.reaches(one, other):
                net.tell_cut(one, other)
    net.settle(SOON * 6)


@pytest.mark.parametrize(
    ("size", "side", "goes_on"), [(5, [0, 1], [2, 3, 4]), (4, [2, 3], [0, 1]), (4, [0, 3], [0, 3])]
)
def test_a_majority_goes_on_and_of_two_halves_the_one_with_the_lowest_rank(
    size: int, side: list[int], goes_on: list[int]
) -> None:
    net = net_of(size, 1)
    cut_in_two(net, side)
    assert net.decided == {0: tuple(range(size)), 1: tuple(goes_on)}
    # The others hear of it once they are reached again, and are out.
    net.parts = {}
    for one in net.alive():
        for other in net.alive():
            net.tell_reach(one, other)
    settled(net)
    assert [each for each in net.alive() if net.nodes[each].is_out] == [e for e in range(size) if e not in goes_on]


def test_the_referee_decides_between_halves() -> None:
    net = net_of(4, 2, has_referee=True)
    net.parts = dict.fromkeys([2, 3], 1)
    for one in (2, 3):
        net.tell_cut(one, 0)
        net.tell_cut(one, 1)
    net.settle(SOON)
    assert net.decided[1] == (2, 3)
    for one in (0, 1):
        net.tell_cut(one, 2)
        net.tell_cut(one, 3)
    net.settle(SOON)
    assert net.nodes[0].is_out  # the referee knows the decision


def test_an_end_whose_vote_nobody_kept_counts_as_silence() -> None:
    net = net_of(3, 3)
    for lost in (1, 2):
        net.kill(lost)
        net.tell_end(0, lost, is_kept=False)
    net.settle(SOON)
    assert net.decided == {0: (0, 1, 2)}
    net.tell_end(0, 1)
    net.settle(SOON)
    assert net.decided[1] == (0,)  # half of two, with the lowest rank


def test_the_ended_that_had_moved_on_does_not_count() -> None:
    """A rank that was frozen must not go on alone after the others, which went on without it, have lost one more."""
    net = net_of(3, 4)
    net.frozen = {0}
    for one in (1, 2):
        net.tell_cut(one, 0)
    net.settle(SOON)
    assert net.decided[1] == (1, 2)
    net.kill(1)
    net.parts = {0: 1}
    net.frozen = set()
    net.under_way.clear()
    net.tell_end(0, 1)
    net.tell_cut(0, 2)
    net.tell_end(2, 1)
    net.settle(SOON)
    assert net.nodes[0].is_out
    assert net.decided == {0: (0, 1, 2), 1: (1, 2), 2: (2,)}


def test_fewer_than_the_least_wait_for_newcomers() -> None:
    net = net_of(3, 5, least=3)
    net.kill(0)
    for member in (1, 2):
        net.tell_end(member, 0)
    net.settle(SOON)
    assert max(net.decided) == 0
    assert net.nodes[1].too_few == (1, 2)
    net.knock(7, 2)
    assert settled(net) == [1, 2, 7]
    assert not net.nodes[1].too_few


def test_newcomers_join_and_members_leave() -> None:
    net = net_of(3, 6)
    net.knock(5, 2)
    assert settled(net) == [0, 1, 2, 5]
    net.leave(0)
    assert settled(net) == [1, 2, 5]
    assert net.nodes[0].is_out


def break_links(net: SuccessionNet, links: list[tuple[int, int]]) -> None:
    """Break all links but these, and tell both ends."""
    for one in net.alive():
        for other in net.alive():
            if one != other and (one, other) not in links and (other, one) not in links:
                net.broken.add((one, other))
                net.tell_cut(one, other)


@pytest.mark.parametrize(
    ("size", "links"), [(4, [(1, 2), (2, 3)]), (5, [(0, 4), (1, 4), (2, 4), (3, 4)]), (5, [(0, 1), (1, 2), (2, 3)])]
)
def test_the_member_that_reaches_enough_leads(size: int, links: list[tuple[int, int]]) -> None:
    """Those that come first by rank reach too few, and must not keep the one that reaches enough from its turn."""
    net = net_of(size, 9, loss=0.0)
    break_links(net, links)
    for _ in range(SOON * 4):
        if len(net.decided) > 1:
            break
        net.settle(1)
    assert len(net.decided) > 1


def test_a_leader_that_hears_nothing_does_not_lead_without_end() -> None:
    net = net_of(4, 10, loss=0.0)
    net.broken = {(each, 0) for each in (1, 2, 3)}
    net.begin(0)
    net.settle(SOON * 2)
    assert net.decided[1] == (1, 2, 3)


def test_the_ballots_of_the_ended_are_passed_at_once() -> None:
    """A member learns at the same time that a generation began, and that another has tried often to end it."""
    node = Succession(1, 0, (0, 1))
    outcomes = [node.end(0, Vote(1, (0, 1), Ballot(1000, 0))), *[node.tick() for _ in range(SOON)]]
    assert [each for outcome in outcomes for each in outcome.generations] == [(1, (0, 1)), (2, (1,))]


def test_the_latest_of_two_votes_of_an_ended_member_counts() -> None:
    earlier, later = Vote(0, (0, 1, 2)), Vote(0, (0, 1, 2), Ballot(2, 2), Ballot(2, 2), (1, 2, 7))
    for votes in [(earlier, later), (later, earlier)]:
        node = Succession(0, 0, (0, 1, 2))
        for vote in votes:
            node.end(1, vote)
        outcomes = [node.end(2, later), *[node.tick() for _ in range(SOON)]]
        assert (1, (1, 2, 7)) in [each for outcome in outcomes for each in outcome.generations]


def test_a_slow_answer_in_one_vote_does_not_cost_the_place_in_the_next() -> None:
    net = net_of(5, 11, loss=0.0)
    net.begin(0)
    for _ in range(PATIENCE + 5):  # all promise; what 2, 3 and 4 accept is lost
        net.exchange(lambda sender, _, data: sender < 2 or decode(data).kind != ACCEPT)
        net.tick()
    net.exchange(lambda sender, _, data: sender < 3 or decode(data).kind != ACCEPT)
    net.settle(1)
    assert net.decided == {0: (0, 1, 2, 3, 4), 1: (0, 1, 2, 3, 4)}
    net.leave(1)
    net.exchange(lambda *_: True)  # the call
    net.exchange(lambda *_: True)  # questions
    late = net.exchange(lambda sender, *_: sender != 3)
    net.under_way += late
    net.settle(SOON)
    assert net.decided[2] == (0, 2, 3, 4)


def test_messages_do_not_grow_with_the_age_of_a_job() -> None:
    net = net_of(3, 12, loss=0.0)
    early = 0
    for newcomer in range(10, 40):
        net.knock(newcomer, 0)
        net.settle(4)
        net.kill(newcomer)
        for member in net.alive():
            net.tell_end(member, newcomer)
        net.settle(4)
        assert net.decided[max(net.decided)] == (0, 1, 2)
        early = early or net.longest
    assert net.longest <= early + 20  # the numbers have more digits


def test_only_members_are_heard() -> None:
    node = Succession(0, 0, (0, 1, 2))
    assert not node.hear(7, encode(VoteMessage(CALL, 0))).sends
    assert not node.is_voting
    node.begin()
    accepted = Vote(0, (0, 1, 2), Ballot(1, 0), Ballot(1, 0), (7,))
    node.hear(7, encode(VoteMessage(PROMISE, 0, ballot=Ballot(1, 0), vote=accepted)))
    outcomes = [node.hear(each, encode(VoteMessage(PROMISE, 0, ballot=Ballot(1, 0)))) for each in (1, 2)]
    proposed = [decode(data).members for outcome in outcomes for _, data in outcome.sends]
    assert proposed == [(0, 1, 2), (0, 1, 2)]


def die(net: SuccessionNet, member: int, _other: int) -> None:
    if len(net.alive()) > 1:
        net.kill(member)


def hear_of_an_end(net: SuccessionNet, member: int, other: int) -> None:
    if net.dead:
        net.tell_end(member, sorted(net.dead)[other % len(net.dead)], is_kept=other % 4 > 0)


def split(net: SuccessionNet, _member: int, _other: int) -> None:
    net.parts = {each: net.random.randrange(2) for each in net.nodes}


def heal(net: SuccessionNet, _member: int, _other: int) -> None:
    net.parts, net.broken = {}, set()


def pass_over(net: SuccessionNet, member: int, _other: int) -> None:
    """Let time pass in which nothing comes, so that another member leads."""
    for _ in range(3 * PATIENCE):
        net.tick()
    net.begin(member)


ACTS: dict[str, Callable[[SuccessionNet, int, int], object]] = {
    "die": die,
    "end": hear_of_an_end,
    "cut": lambda net, member, other: net.tell_cut(member, sorted(net.nodes)[other % len(net.nodes)]),
    "doubt": lambda net, member, other: net.doubt(member, sorted(net.nodes)[other % len(net.nodes)]),
    "freeze": lambda net, member, _: net.frozen.add(member),
    "thaw": lambda net, member, _: net.frozen.discard(member),
    "split": split,
    "break": lambda net, member, other: net.broken.add((member, sorted(net.nodes)[other % len(net.nodes)])),
    "heal": heal,
    "knock": lambda net, member, other: net.knock(100 + other, member),
    "turn away": lambda net, _member, _other: net.kill(min(net.waiting)) if net.waiting else None,
    "leave": lambda net, member, _: net.leave(member) if len(net.alive()) > 2 else None,
    "run": lambda net, _, other: net.deliver(other),
    "step": lambda net, _, other: net.deliver(1 + other % 2),
    "silence": pass_over,
    "tick": lambda net, _member, _other: net.tick(),
}


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, int, bool, list[tuple[str, int, int]]]:
    size = draw(st.integers(2, 7))
    event = st.tuples(st.sampled_from([*ACTS, "run", "run", "tick"]), st.integers(0, 6), st.integers(0, 30))
    return size, draw(st.integers(0, 2**32)), draw(st.booleans()), draw(st.lists(event, min_size=5, max_size=60))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(stories())
def test_there_is_one_decision_and_it_comes(story: tuple[int, int, bool, list[tuple[str, int, int]]]) -> None:
    """Whatever happens, no two sets go on; and once all that happened is known to all, those that are left go on."""
    play(*story)


def play(size: int, seed: int, has_referee: bool, events: list[tuple[str, int, int]]) -> None:  # noqa: FBT001
    net = net_of(size, seed, has_referee=has_referee, loss=0.2)
    for kind, one, other in events:
        alive = net.alive()
        ACTS[kind](net, alive[one % len(alive)], other)
    for _ in range(10):  # newcomers may come now that do not know it yet
        net.tell_truth()
        net.settle(SOON)
    members = settled(net)
    assert set(members) <= set(net.alive()) or all(net.nodes[each].is_out for each in net.alive())


def story_of(seed: int) -> tuple[int, int, bool, list[tuple[str, int, int]]]:
    """Return a story. Every second one has leaders that compete, and messages that come one by one."""
    random = Random(seed)  # noqa: S311 -- no secret
    kinds = [*ACTS, "run", "run", "tick"] if seed % 2 else ["cut", "silence", "tick", "die", "end", *["step"] * 8]
    events = [(random.choice(kinds), random.randrange(7), random.randrange(31)) for _ in range(random.randrange(5, 60))]
    return random.randrange(2, 8) if seed % 2 else random.randrange(3, 5), seed, random.random() < 0.5, events


def counts_all(ended: Any, generation: int, ballot: Ballot) -> dict[int, Vote]:
    """Take an end whose vote nobody kept, and one that promised more, for an end that does not count."""
    del ballot
    return {each: vote if vote and vote.generation == generation else Vote(generation) for each, vote in ended.items()}


def accepts_all(self: Vote, ballot: Ballot, members: tuple[int, ...]) -> Vote:
    return replace(self, promised=ballot, accepted_in=ballot, accepted=members)


def any_half(members: Any, said: Any, ended: Any, **_: bool) -> bool:
    left = [member for member in members if member not in ended]
    return 2 * sum(member in said for member in left) >= len(left)


# What is wrong without each rule, and the seeds of stories that show it.
RULES: dict[str, tuple[Any, str, Any]] = {
    "ends count by their votes": (succession, "removable", counts_all),
    "what was accepted is proposed again": (succession, "accepted_last", lambda votes: votes and None),
    "a later promise forbids to accept": (Vote, "accept", accepts_all),
    "one half goes on": (succession, "are_enough", any_half),
    "who ended does not count": (succession, "removable", lambda *_: {}),
    "who missed a decision is told": (Succession, "_tell", lambda *_: None),
    "messages are repeated": (Succession, "tick", lambda self: self._advance(VoteOutcome())),
}


def decide_without_a_witness() -> None:
    """The leader decides and dies. Of the others, one has accepted, and knows of no decision."""
    net = net_of(3, 0, loss=0.0)
    net.knock(9, 0)
    while 1 not in net.decided:
        net.exchange(lambda sender, to, _: 2 not in (sender, to))
        if not net.under_way:
            net.tick()
    assert net.decided[1] == (0, 1, 9)
    net.under_way.clear()
    net.kill(0)
    net.begin(1)
    net.settle(SOON)


def propose_late() -> None:
    """A proposal comes late, when another ballot has been decided and not all know it."""
    net = net_of(3, 0, loss=0.0)
    net.begin(0)
    net.exchange(lambda *_: True)  # questions
    net.exchange(lambda *_: True)  # promises
    late = net.exchange(lambda *_: False)
    net.frozen = {0}
    while 1 not in net.decided:
        net.exchange(lambda _, to, data: to != 0 and decode(data).kind != DECIDED)
        net.tick()
    assert net.decided[1] == (1, 2)
    net.frozen, net.under_way = set(), [each for each in late if each[1] == 2]
    net.exchange(lambda *_: True)
    net.exchange(lambda _, to, _data: to == 0)


STORIES = {
    "what was accepted is proposed again": decide_without_a_witness,
    "a later promise forbids to accept": propose_late,
}


@pytest.mark.parametrize("rule", STORIES)
def test_a_story_of_one_decision(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    STORIES[rule]()
    monkeypatch.setattr(*RULES[rule])
    with pytest.raises(AssertionError, match=r"generation 1: \(.* and \("):
        STORIES[rule]()


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in STORIES])
def test_each_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*RULES[rule])
    for seed in range(3000):
        try:
            play(*story_of(seed))
        except AssertionError:
            return
    pytest.fail("no story shows that the rule is left out")


def test_votes_of_two_halves_never_both_suffice() -> None:
    random = Random(7)  # noqa: S311 -- no secret
    for _ in range(20_000):
        members = list(range(random.randrange(1, 8)))
        living = [each for each in members if random.random() < 0.8]
        side = [each for each in living if random.random() < 0.5]
        ends = [{each for each in members if each not in living and random.random() < 0.5} for _ in range(2)]
        other = [each for each in living if each not in side]
        both = [
            are_enough(members, said, ended, has_referee=False, referee=False)
            for said, ended in zip((side, other), ends, strict=True)
        ]
        assert not all(both)


def test_agreeable_members_reach_each_other() -> None:
    assert agreeable([0, 1, 2, 3], {0: {3}, 1: {3}}) == [0, 1, 2]
    assert agreeable([0, 1], {1: {0}}) == [0]
    assert agreeable([0, 1, 2], {0: {0, 9}}) == [0, 1, 2]


def test_messages_come_as_they_were() -> None:
    vote = Vote(3, (0, 1, 2), Ballot(4, 1), Ballot(2, 0), (0, 2))
    message = VoteMessage(
        "p", 3, {1: vote, 5: None}, frozenset({9}), Ballot(4, 1), vote, doubts=frozenset({2}), leaving=True
    )
    assert decode(encode(message)) == message
    decided = VoteMessage("d", 3, members=(1, 2))
    assert decode(encode(decided)) == decided


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'["q",0,[],[]]',
        b'["d",0,[],[],[1.5]]',
        b'["a",0,[],[],[1]]',
        b'["d",true,[],[],[1]]',
        b'["a",0,[],[],[1%s,1]]' % (b"0" * 4000),
        b"[" * 100_000,
    ],
    ids=range(9),
)
def test_other_messages_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no message of a vote"):
        Succession(0, 0, [0, 1]).hear(1, data)


def test_other_bytes_do_nothing_else() -> None:
    random = Random(8)  # noqa: S311 -- no secret
    good = json.loads(encode(VoteMessage("p", 0, {1: Vote(0)}, ballot=Ballot(1, 0))))
    refused = 0
    for _ in range(3000):
        bad = json.loads(json.dumps(good))
        bad[random.randrange(len(bad))] = random.choice([None, -1, "x", [], [[]], {}, 1e9, [1, 2, 3], [[1, [2]]]])
        try:
            Succession(0, 0, [0, 1]).hear(1, json.dumps(bad).encode())
        except ValueError:
            refused += 1
    assert refused > 2000
