"""The agreement on an order: all ranks decide the same, for any order of announcements and any delays."""

import subprocess
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from benchmarks.promises import control_plane
from benchmarks.promises.control_plane import count, levels
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.agreement_net import Net, Program

from multiring._agreement import Deadlock, Joined, Lost, Member, Missing, Ready, Refused, Silent
from multiring._agreement.tree import height_of, place_of

NAMES = [f"gradient.{number}" for number in range(5)]
TERMS = "all_reduce of float32 (2, 3), average"
groups = st.builds(Net, st.integers(1, 40), st.integers(2, 5), st.randoms(use_true_random=True))
some_groups = settings(max_examples=30)


def group_of(size: int, radix: int = 2) -> Net:
    return Net(size, radix, Random(1))  # noqa: S311 -- any order will do


def shuffled(random: Random, names: list[str]) -> list[str]:
    return random.sample(names, len(names))


def ready(name: str, joined: int = 0) -> Ready:
    return Ready(name, TERMS, joined)


@given(st.integers(1, 300), st.integers(2, 17))
def test_the_tree_reaches_every_rank_once_over_short_paths(size: int, radix: int) -> None:
    places = [place_of(rank, size, radix) for rank in range(size)]
    for rank, place in enumerate(places):
        assert len(place.children) <= radix
        below = [other for child in place.children for other in child]
        assert below == list(range(rank + 1, rank + 1 + len(below)))
        for child in place.children:
            assert (places[child.start].parent, places[child.start].depth) == (rank, place.depth + 1)
            assert places[child.start].height < place.height
    assert sum(len(place.children) for place in places) == size - 1
    assert places[0].height == height_of(size, radix) == max(place.depth for place in places) <= levels(size, radix)


@pytest.mark.parametrize(
    ("rank", "size", "radix", "text"),
    [(3, 3, 16, "rank is 3, want one of a group of 3: 0 to 2"), (-1, 3, 16, "rank is -1"), (0, 3, 1, "radix is 1")],
)
def test_a_member_has_a_place_in_a_tree(rank: int, size: int, radix: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Member(rank, size, radix)


@some_groups
@given(groups, st.integers(1, 3))
def test_all_ranks_agree_on_one_order_whatever_their_own(net: Net, rounds: int) -> None:
    orders = [[name for _ in range(rounds) for name in shuffled(net.random, NAMES)] for _ in range(net.size)]
    net.start(net.program(rank, [(name, TERMS) for name in order]) for rank, order in enumerate(orders))
    assert net.run(inquiries=0.01)
    net.check_all_alike()
    decided = [each for each in net.decisions[0] if not isinstance(each, Missing)]
    assert sorted(decided, key=repr) == sorted((ready(name) for name in NAMES * rounds), key=repr)
    assert not any(net.open)


def test_a_rank_alone_decides_at_once() -> None:
    member = Member(0, 1)
    outcome = member.announce_all([("a", TERMS), ("b", TERMS)])
    assert (outcome.messages, outcome.decisions) == ([], [ready("a"), ready("b")])
    assert member.inquire().decisions == [Missing({}, {}, (), ())]
    assert member.join().decisions == [Joined(0)]
    assert member.announce("a", TERMS).decisions == [ready("a")]


@pytest.mark.parametrize(("ranks", "radix"), [(27_360, 16), (256, 16), (256, 2), (97, 5), (1, 2)])
def test_a_round_takes_few_messages_and_steps(ranks: int, radix: int) -> None:
    counted = count(ranks=ranks, radix=radix, operations=2)
    assert counted.messages == 2 * (ranks - 1)
    assert counted.most_sent <= radix + 1
    assert counted.most_taken <= radix + 1
    assert counted.steps <= 2 * levels(ranks, radix)


def test_ranks_that_are_processes_take_as_few() -> None:
    command = [sys.executable, "-W", "error::ResourceWarning", control_plane.__file__]
    command += ["--processes", "--ranks", "1,30", "--radix", "3"]
    printed = subprocess.run(command, check=True, timeout=240, capture_output=True, text=True).stdout
    counted = count(ranks=30, radix=3, operations=4)
    *_, last = printed.splitlines()
    values = [30, 3, counted.most_sent, 4, counted.most_taken, 58, counted.steps, 8, 2, counted.longest_bytes]
    assert last.split() == [str(value) for value in values]


def test_several_names_take_as_few_messages_as_one() -> None:
    alone, many = (count(ranks=40, radix=3, operations=operations) for operations in (1, 50))
    assert (alone.steps, alone.most_sent, alone.messages) == (many.steps, many.most_sent, many.messages)


@some_groups
@given(groups, st.integers(1, 3), st.sampled_from([0.02, 0.2, 0.7]))
def test_who_differs_is_refused_everywhere_and_the_rest_goes_on(net: Net, rounds: int, strays: float) -> None:
    programs = []
    for rank in range(net.size):
        order = [name for _ in range(rounds) for name in shuffled(net.random, NAMES)]
        terms = [f"shape ({net.random.randrange(3)},)" if net.random.random() < strays else TERMS for _ in order]
        programs.append(net.program(rank, zip(order, terms, strict=True)))
    net.start(programs)
    assert net.run(inquiries=0.01)
    # Anything left over from the rejected operations would disturb these two rounds without disagreement.
    net.start(net.program(rank, [(name, TERMS) for name in NAMES * 2]) for rank in range(net.size))
    assert net.run()
    net.check_all_alike()
    assert [net.decided[name] for name in NAMES] == [rounds + 2] * len(NAMES)
    assert {type(decision) for decision in net.decisions[0][-2 * len(NAMES) :]} == {Ready}
    assert not any(net.open)


def test_a_refusal_says_who_said_what_and_does_not_wait_for_all() -> None:
    net = group_of(4)
    net.announce(0, ("loss", "float32"))
    net.announce(1, ("loss", "float64"))
    net.settle()
    refused = Refused("loss", {0: "float32", 1: "float64"}, {"float32": 1, "float64": 1})
    assert net.decisions == [[refused]] * 4
    net.announce(3, ("loss", "float32"))  # these ranks announce after the decision
    net.announce(2, ("loss", "float32"))
    assert net.notes == [[], [], [refused], [refused]]
    assert not net.under_way
    for rank in range(4):
        net.announce(rank, ("loss", "float32"))
    net.settle()
    assert net.decisions == [[refused, Ready("loss", "float32", 0)]] * 4


def test_a_rank_that_was_late_twice_is_told_twice() -> None:
    net = group_of(3)
    for terms in ("a", "b"):
        net.announce(0, ("x", terms))
        net.announce(1, ("x", "c"))
        net.settle()
    net.announce(2, ("x", "a"))
    net.announce(2, ("x", "b"))
    assert [note.terms for note in net.notes[2] if isinstance(note, Refused)] == [{0: "a", 1: "c"}, {0: "b", 1: "c"}]


def test_of_many_that_say_the_same_a_few_are_named() -> None:
    net = group_of(40, radix=5)
    for rank in range(1, 40):
        net.announce(rank, ("x", "most"))
    net.settle()
    net.announce(0, ("x", "one"))
    net.settle()
    (refused,) = net.decisions[39]
    assert isinstance(refused, Refused)
    assert refused.counts == {"one": 1, "most": 39}
    assert len(refused.terms) == 9
    assert refused.terms[0] == "one"


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda member: member.announce("a", TERMS), "rank 1 has announced 'a' already, and it is not decided yet"),
        (lambda member: member.announce_all([("b", TERMS), ("b", TERMS)]), "a name occurs twice"),
        (lambda member: member.announce("\ud83d\ude00", TERMS), "surrogates not allowed"),
        (lambda member: member.lost(1), "rank 1 is lost: want a rank other than 1 in a group of 3"),
        (lambda member: member.lost(3), "rank 3 is lost"),
        (lambda member: [member.join(), member.join()], "rank 1 has joined"),
        (lambda member: [member.join(), member.announce("c", TERMS)], "rank 1 has joined"),
    ],
)
def test_a_rank_cannot_say_what_makes_no_sense(act: Callable[[Member], Any], text: str) -> None:
    member = Member(1, 3)
    member.announce("a", TERMS)
    with pytest.raises(ValueError, match=text):
        act(member)


@some_groups
@given(groups, st.data())
def test_ranks_that_have_joined_count_as_coming_to_everything(net: Net, data: st.DataObject) -> None:
    steps_of_ranks = st.lists(st.integers(0, 4), min_size=net.size, max_size=net.size)
    epochs = data.draw(st.lists(steps_of_ranks, min_size=1, max_size=2))

    def program(rank: int) -> Program:
        for steps in epochs:
            yield from net.program(rank, [(name, TERMS) for name in shuffled(net.random, NAMES[: steps[rank]])])
            net.join(rank)
            while rank in net.joining:
                yield

    net.start(program(rank) for rank in range(net.size))
    assert net.run(inquiries=0.01)
    net.check_all_alike()
    decided = [decision for decision in net.decisions[0] if not isinstance(decision, Missing)]
    for steps in epochs:
        until = next(place for place, decision in enumerate(decided) if isinstance(decision, Joined))
        epoch, decided = decided[:until], decided[until + 1 :]
        wanted = [ready(NAMES[step], sum(mine <= step for mine in steps)) for step in range(max(steps))]
        assert sorted(epoch, key=repr) == sorted(wanted, key=repr)
    assert not decided


def test_the_last_to_join_is_the_same_everywhere() -> None:
    net = group_of(7)
    for rank in (3, 0, 6, 2, 1, 4, 5):
        net.join(rank)
        net.settle()
    assert net.decisions == [[Joined(5)]] * 7


def test_the_last_to_join_is_who_waited_least() -> None:
    """Ranks that joined before the agreement began announce their joins in any order."""
    for order in ((3, 0, 6, 2, 1, 4, 5), (5, 4, 3, 2, 1, 0, 6)):
        net = group_of(7)
        for rank in order:
            net.join(rank, waited_us=100 * (rank - 2) ** 2)
            net.settle()
        assert net.decisions == [[Joined(2)]] * 7


def halted(net: Net, joins: float) -> None:
    """Bring the group into a random state without progress. `joins` is the probability that a rank has joined."""
    for rank in range(net.size):
        for name in shuffled(net.random, NAMES):
            if net.random.random() < 0.8:
                net.announce(rank, (name, TERMS))
        if net.random.random() < joins:
            net.join(rank)
    net.settle()
    for rank in range(net.size):
        if net.open[rank] and net.random.random() < 0.7:
            net.wait_for(rank, net.random.choice(sorted(net.open[rank])))


@given(groups, st.sampled_from([0.0, 0.3, 0.9]))
def test_an_inquiry_finds_who_is_missing_and_what_cannot_go_on(net: Net, joins: float) -> None:
    halted(net, joins)
    missing, stuck = net.missing(), net.stuck()
    concerned = {rank for ranks in missing.values() for rank in ranks}
    joined = set(net.joined)
    for rank in net.random.sample(range(net.size), net.random.randint(1, net.size)):
        net.inquire(rank)
    net.settle()
    net.check_all_alike()
    found = [decision for decision in net.decisions[0] if isinstance(decision, Missing | Deadlock)]
    assert found[0] == Missing(
        names=missing,
        blocked={rank: name for rank, name in net.blocked.items() if rank in concerned},
        unjoined=tuple(rank for rank in range(net.size) if rank not in joined) if joined else (),
        silent=(),
    )
    deadlocks = [decision for decision in found if isinstance(decision, Deadlock)]
    if not stuck:
        assert not deadlocks
        return
    assert deadlocks == [found[1]]
    assert deadlocks[0].names == {name: missing[name] for name in stuck}
    assert deadlocks[0].blocked == {
        rank: name for rank, name in net.blocked.items() if name in stuck and rank not in missing[name]
    }


@some_groups
@given(groups, st.sampled_from([0.3, 1.0]))
def test_programs_that_wait_for_each_other_are_told_and_go_on(net: Net, waits: float) -> None:
    orders = [shuffled(net.random, NAMES) * 2 for _ in range(net.size)]
    net.start(net.program(rank, [(name, TERMS) for name in order], waits) for rank, order in enumerate(orders))
    while not net.run(inquiries=0.005):
        known = sum(isinstance(decision, Deadlock) for decision in net.decisions[0])
        net.inquire(net.random.randrange(net.size))
        net.settle()
        assert sum(isinstance(decision, Deadlock) for decision in net.decisions[0]) > known
    net.check_all_alike()
    assert [net.decided[name] for name in NAMES] == [2] * len(NAMES)
    assert not any(net.open)


def test_all_that_wait_for_each_other_are_named() -> None:
    net = group_of(3)
    for rank, name in enumerate("xxy"):
        net.announce(rank, (name, TERMS))
        net.wait_for(rank, name)
    net.settle()
    net.inquire(2)
    net.settle()
    found, blocked = {"x": (2,), "y": (0, 1)}, {0: "x", 1: "x", 2: "y"}
    deadlock = Deadlock(blocked, found)
    assert net.decisions == [[Missing(found, blocked, (), ()), deadlock]] * 3
    net.announce(2, ("x", TERMS))  # a rejected announcement stays rejected
    assert net.notes[2] == [Deadlock(blocked, {"x": (2,)})]
    assert not net.under_way


def test_who_waits_for_a_rank_that_only_computes_is_not_stuck() -> None:
    net = group_of(3)
    for rank, name in enumerate("xy"):
        net.announce(rank, (name, TERMS))
        net.wait_for(rank, name)
    net.announce(1, ("x", TERMS))
    net.wait_for(2, "decided long ago")
    net.settle()
    net.inquire(0)
    net.settle()
    names = {"x": (2,), "y": (0, 2)}
    assert net.decisions == [[Missing(names, {0: "x", 2: "decided long ago"}, (), ())]] * 3


def test_what_was_answered_before_all_had_joined_is_asked_again() -> None:
    net = group_of(3)
    net.join(0)
    net.join(1)
    net.pass_on(1, 0)
    net.inquire(0)
    net.pass_on(0, 1)
    net.pass_on(1, 0)  # rank 1 has joined
    net.join(2)
    net.settle()
    assert net.decisions == [[Joined(2), Missing({}, {}, (), ())]] * 3


def test_an_answer_to_an_earlier_question_is_none_to_this_one() -> None:
    net = group_of(3)
    net.inquire(0)
    net.pass_on(0, 2)
    net.pass_on(0, 1)
    net.pass_on(1, 0)
    net.stopped.add(2)
    net.conclude(0)
    net.announce(2, ("x", TERMS))
    net.inquire(0)
    net.pass_on(2, 0)  # the answer that rank 0 did not wait for
    net.stopped = {0}
    net.settle()
    net.stopped.clear()
    net.pass_on(1, 0)
    assert net.decisions[0] == [Missing({}, {}, (), (2,))]
    net.settle()
    assert net.decisions == [[Missing({}, {}, (), (2,)), Missing({"x": (0, 1)}, {}, (), ())]] * 3


def test_who_asks_again_while_others_are_asked_waits_on() -> None:
    net = group_of(3)
    net.inquire(1)
    net.pass_on(1, 0)
    net.pass_on(0, 1)
    net.inquire(1)
    net.pass_on(0, 2)
    net.pass_on(2, 0)
    net.pass_on(1, 0)
    net.pass_on(0, 1)
    assert net.decisions[1] == [Missing({}, {}, (), ())]
    assert net.members[1].patience > 0
    net.settle()
    assert net.decisions[1] == [Missing({}, {}, (), ())] * 2
    assert net.members[1].patience == 0


@given(groups, st.data())
def test_a_rank_that_says_nothing_is_named_on_all_others(net: Net, data: st.DataObject) -> None:
    halted(net, joins=0)
    stopped = data.draw(st.integers(0, net.size - 1))
    net.stopped.add(stopped)
    others = [rank for rank in range(net.size) if rank != stopped]
    for rank in others:
        net.inquire(rank)
    waiting, since = [(0, 0)] * net.size, [0] * net.size
    for unit in range(10 * (height_of(net.size, net.radix) + 1)):
        net.settle()
        for rank in others:
            patience = net.members[rank].patience
            if waiting[rank] != (patience, len(net.decisions[rank])):
                waiting[rank], since[rank] = (patience, len(net.decisions[rank])), unit
            if patience and unit - since[rank] >= patience:
                net.conclude(rank)
    assert not any(net.members[rank].patience for rank in others)
    for rank in others:
        answers = {decision.silent for decision in net.decisions[rank] if isinstance(decision, Missing)}
        notes = {(note.rank,) for note in net.notes[rank] if isinstance(note, Silent)}
        assert answers | notes == {(stopped,)}
    # The stopped rank resumes, and everything works as before.
    net.stopped.clear()
    net.settle()
    known, missing = len(net.decisions[0]), net.missing()
    net.inquire(stopped)
    net.settle()
    net.check_all_alike()
    answer = net.decisions[0][known]
    assert isinstance(answer, Missing)
    assert (answer.names, answer.silent) == (missing, ())


@some_groups
@given(groups, st.data())
def test_after_a_loss_nothing_is_decided_and_all_know(net: Net, data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.integers(0, net.size - 1), max_size=min(3, net.size - 1)))
    deaths = {rank: data.draw(st.integers(0, 12)) for rank in sorted(lost)}
    orders = [shuffled(net.random, NAMES) * 3 for _ in range(net.size)]
    programs = [net.program(rank, [(name, TERMS) for name in order]) for rank, order in enumerate(orders)]
    owed: list[tuple[int, int]] = []
    for moment in range(14):
        for rank, program in enumerate(programs):
            if deaths.get(rank) == moment:
                net.kill(rank)
                owed += ((other, rank) for other in net.next_to(rank))
            if rank not in net.gone:
                next(program, None)
            for _ in range(net.random.choice((0, 1, 2))):
                net.deliver()
        if owed and net.random.random() < 0.3:
            net.lose(*owed.pop(net.random.randrange(len(owed))))
    for other, rank in owed:
        net.lose(other, rank)
    net.settle()
    survivors = [rank for rank in range(net.size) if rank not in net.gone]
    longest = max((net.decisions[rank] for rank in survivors), key=len)
    for rank in survivors if lost else []:
        *before, last = net.decisions[rank]
        assert before == longest[: len(before)]
        assert not any(isinstance(decision, Lost) for decision in before)
        assert isinstance(last, Lost)
        assert last.rank in lost
        member = net.members[rank]
        for outcome in (member.announce("later", TERMS), member.join(), member.inquire()):
            assert (outcome.notes, outcome.messages, outcome.decisions) == ([last], [], [])
        assert member.lost(min(lost)) == member.wait_for("later") == member.conclude()
        assert member.patience == 0
