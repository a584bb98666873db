"""Bytes that no member has sent are rejected and change nothing."""

import contextlib
import json
import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring._agreement import AgreementOutcome, Member

# A tree of seven ranks with two children each: 0 is the parent of 1 and 4, 1 of 2 and 3, and 4 of 5 and 6.
SIZE, RADIX, RANK, PARENT, CHILD = 7, 2, 1, 0, 2
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.sampled_from(["r", "o", "x", "m", "d", "a", ""]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
)


def orders(*decisions: str) -> bytes:
    return f'["o",0,[{",".join(decisions)}],null]'.encode()


@pytest.mark.parametrize(
    ("sender", "message", "text"),
    [
        (5, b'["l",0]', "the sender is not next to this rank in the tree"),
        (PARENT, b"\xff\xff", "it is not JSON"),
        (PARENT, b"[" * 200_000, "nested too deeply"),
        (PARENT, b"{}", "want orders, got a dict of 0"),
        (PARENT, b'["r",0,[],null,0,null]', "want orders, got a list of 6"),
        (PARENT, b'["o",1,[],null]', "the orders follow 1 decisions, want 0"),
        (PARENT, b'["o",-1,[],null]', "want an integer >= 0, got -1"),
        (PARENT, b'["o",0,[],true]', "want an integer >= 0, got True"),
        (PARENT, b'["s",7]', "want 0 to 6, got 7"),
        (PARENT, orders('"r"'), "want a decision, got 'r'"),
        (PARENT, orders('["r","a"]'), "want a decision, got a list of 2"),
        (PARENT, orders('["r","a","t",7]'), "want 0 to 6, got 7"),
        (PARENT, orders('["j",1.0]'), "want 0 to 6, got 1.0"),
        (PARENT, orders('["x","a",[["t",1,[0]]]]'), "want two or more different terms, got a list of 1"),
        (PARENT, orders('["x","a",[["t",1,[0]],["t",1,[1]]]]'), "want two or more different terms, got a list of 2"),
        (PARENT, orders('["x","a",[["t",1,[0]],["u",7,[1]]]]'), "8 of 7 ranks are counted"),
        (PARENT, orders('["x","a",[["t",1,[0,1]],["u",1,[2]]]]'), "2 ranks are listed for 1 of 7 with the same terms"),
        (PARENT, orders('["x","a",[["t",1,[]],["u",1,[2]]]]'), "0 ranks are listed for 1 of 7"),
        (PARENT, orders('["x","a",["t"]]'), "want terms, a count and ranks, got 't'"),
        (PARENT, orders('["m",[],{},[],[]]'), "want ranks by name, got a list of 0"),
        (PARENT, orders('["m",{"a":[1]},{},[],[]]'), "want runs of ranks, got a list of 1"),
        (PARENT, orders('["m",{"a":[3,2]},{},[],[]]'), "want runs of ranks of 0 to 6, got 2"),
        (PARENT, orders('["d",{"a":[0,8]},{}]'), "want runs of ranks of 0 to 6, got 8"),
        (CHILD, b'["o",0,[],null]', "want a report, got a list of 4"),
        (CHILD, b'["s",0]', "want a report, got a list of 2"),
        (CHILD, b'["l",9]', "want 0 to 6, got 9"),
        (CHILD, b'["r",1,[],null,0,null]', "the report counts 1 decisions, want 0 to 0"),
        (CHILD, b'["r",0,[["a"]],null,0,null]', "want a name and the ranks' terms, got a list of 1"),
        (CHILD, b'["r",0,[["a","t",1,[3]]],null,0,null]', "want 2 to 2, got 3"),
        (CHILD, b'["r",0,[["a","t"],["a","t"]],null,0,null]', "the report announces one of ['a', 'a'] again"),
        (CHILD, b'["r",0,[],[3,0],0,null]', "want 2 to 2, got 3"),
        (CHILD, b'["r",0,[],2,0,null]', r"want [rank, microseconds] of the last to join, got 2"),
        (CHILD, b'["r",0,[],[2,-1],0,null]', "got -1"),
        (CHILD, b'["r",0,[],null,2,null]', "want a report, got a list of 6"),
        (CHILD, b'["r",0,[],null,0,[1]]', "want an answer, got a list of 1"),
        (CHILD, b'["r",0,[],null,0,[1,{},{},{},[3,4],0,[]]]', "want runs of ranks of 2 to 2, got 4"),
    ],
)
def test_what_no_member_has_sent_is_refused_and_changes_nothing(sender: int, message: bytes, text: str) -> None:
    member = Member(RANK, SIZE, RADIX)
    with pytest.raises(ValueError, match=re.escape(text)) as raised:
        member.receive(sender, message)
    assert f"rank 1 cannot use a message of rank {sender}: " in str(raised.value)
    assert member.receive(2, b'["r",0,[["a","t"]],null,0,null]') == AgreementOutcome()
    assert member.receive(3, b'["r",0,[["a","t"]],null,0,null]') == AgreementOutcome()
    assert member.announce("a", "t") == AgreementOutcome(messages=[(0, b'["r",0,[["a","t"]],null,0,null]')])


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (
            b'["r",0,[["a","t"]],null,0,null]',
            b'["r",0,[["a","t"]],null,0,null]',
            "the report announces one of ['a'] again",
        ),
        (
            b'["r",0,[],[2,0],0,null]',
            b'["r",0,[["a","t"]],null,0,null]',
            "the report has news, but its ranks have joined",
        ),
        (b'["r",0,[],[2,0],0,null]', b'["r",0,[],[2,0],0,null]', "the report has news, but its ranks have joined"),
    ],
)
def test_what_cannot_follow_is_refused(first: bytes, second: bytes, text: str) -> None:
    member = Member(RANK, SIZE, RADIX)
    member.receive(CHILD, first)
    with pytest.raises(ValueError, match=re.escape(text)):
        member.receive(CHILD, second)


def take(member: Member, sender: int, message: bytes) -> None:
    """Give a message to a member; only a ValueError is allowed."""
    with contextlib.suppress(ValueError):
        member.receive(sender, message)


@given(st.sampled_from([(0, 1), (1, 0), (1, 2), (2, 1)]), st.lists(st.binary(max_size=40) | json_values))
def test_any_bytes_are_taken_or_refused(way: tuple[int, int], contents: list[bytes | object]) -> None:
    rank, sender = way
    member = Member(rank, SIZE, RADIX)
    member.announce("a", "t")
    member.inquire()
    for content in contents:
        take(member, sender, content if isinstance(content, bytes) else json.dumps(content).encode())


VALID = [
    (1, 0, orders('["r","a","t",2]', '["x","b",[["t",1,[0]],["u",2,[2,3]]]]')),
    (1, 0, b'["o",0,[["m",{"a":[2,4]},{"a":[0,1,4,5]},[1,3],[2]],["d",{"a":[0,1]},{"a":[3,4]}],["j",3]],1]'),
    (
        0,
        1,
        b'["r",0,[["a","t",2,[1,3]],["b",[["t",1,[1]],["u",1,[2]]]]],[3,250],1,[1,{"a":[2,3]},{"b":[1,2]},{},[1,4],0,[3]]]',
    ),
    (0, 1, b'["r",0,[],null,1,[1,{"a":[2,3],"c":[1,4]},{"a":[1,4]},{"c":[2,3]},[1,4],1,[3]]]'),
]


@given(st.sampled_from(VALID), st.randoms(use_true_random=True), st.integers(0, 3))
def test_bytes_that_have_changed_are_taken_or_refused(
    sent: tuple[int, int, bytes], random: Random, changes: int
) -> None:
    rank, sender, message = sent
    member = Member(rank, SIZE, RADIX)
    member.announce("a", "t")
    member.inquire()
    for _ in range(3):
        changed = bytearray(message)
        for _ in range(changes):
            changed[random.randrange(len(changed))] = random.choice(b'0123456789[]{},"abrxmdojlnt ')
        take(member, sender, bytes(changed))
    member.conclude()
    if not changes:
        fresh = Member(rank, SIZE, RADIX)
        fresh.inquire()
        fresh.receive(sender, message)
