"""Random programs of messages between ranks with device tensors, some of them wrong, on torch's backend "multiring".

A seed draws the messages: sender, receiver, group, tag, type, shape, and what goes wrong. All ranks go through the list
in its order, and send or receive their own. Calls that wait and calls that do not, streams, devices of the process,
host tensors, layouts, tensors that are deleted early, dropped handles and the order of waits are random on each rank.

At the end the ranks compare what became of each message. Without a fault, it has arrived with the right values. With
one, each rank that it concerns has an error that names the cause, or a sender's message had left before. Nobody has
wrong values or waits long, and the group is usable.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from tests.cuda.test_backend import join as join_torch
from tests.support.device_programs import late
from tests.support.device_training import join
from tests.support.failing_calls import INVALID_VALUE, OUT_OF_MEMORY, Failing
from tests.support.ranks import Here
from torch import Tensor

import multiring.torch as mt

dist: Any = torch.distributed  # typed Any, because torch's stubs are incomplete

STEPS = 40
LIMIT_S = 120.0  # no wait may take as long
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int16, torch.int64, torch.complex64)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0, 3), (1,), (7,), (33, 3), (2000,), (70, 300), (5, 4, 3), (500, 300))
FEW_TAGS, HUGE_TAGS = (0, 1, 7), ((1 << 31) - 1, 1 << 31, 1 << 40, (1 << 63) - 1)
RIGHT, DROPPED = "right", "dropped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A message of the program.

    Attributes:
        number: its place in the list.
        place: the number of its group.
        sender, receiver: ranks of the job.
        fault: what goes wrong: "", "sender's memory", "receiver's memory" or "size".
        is_from_any: whether the receive accepts any source.
        received_as: the receiver's type; it has the sender's size.
    """

    number: int
    place: int
    sender: int
    receiver: int
    tag: int
    dtype: torch.dtype
    received_as: torch.dtype
    shape: tuple[int, ...]
    fault: str = ""
    is_from_any: bool = False

    @property
    def channel(self) -> tuple[int, int, int, int]:
        """The messages of a channel arrive in order."""
        return self.place, self.sender, self.receiver, self.tag


@dataclass(slots=True)
class Outcomes:
    """What became of the messages on this rank, by number: "right", "dropped", or an error."""

    sent: dict[int, str] = field(default_factory=dict)
    received: dict[int, str] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)  # a call of CUDA has failed while the rank prepared these


def messages_of(seed: int, groups: Sequence[Sequence[int]]) -> list[Message]:
    """Return the program of a seed; the same on all ranks."""
    dice = random.Random(seed)  # noqa: S311 -- no secret
    found: list[Message] = []
    fresh = 100  # tags from here are used for one purpose only
    while len(found) < STEPS:
        place = dice.choice([number for number, ranks in enumerate(groups) if len(ranks) > 1])
        sender, receiver = dice.sample(list(groups[place]), 2)
        dtype, shape = dice.choice(DTYPES), dice.choice(SHAPES)
        same_size = [each for each in DTYPES if each.itemsize == dtype.itemsize]
        received_as = dice.choice(same_size) if dice.random() < 0.2 else dtype
        tag, fault = dice.choice((*FEW_TAGS, *FEW_TAGS, *HUGE_TAGS)), ""
        is_from_any = dice.random() < 0.2
        senders, count = [sender], 1
        if dice.random() < 0.3:
            fault = dice.choice(("sender's memory", "receiver's memory", "size"))
        if fault == "size" and (is_from_any or 0 in shape):
            fault = ""
        if is_from_any and fault != "receiver's memory":
            senders = [each for each in groups[place] if each != receiver]
            count = dice.randint(1, 2)
        if fault or is_from_any:
            fresh, tag = fresh + 1, fresh + dice.choice((0, 1 << 40))
        drawn = [each for each in senders for _ in range(count)]
        for number, each in enumerate(drawn):
            found.append(
                Message(
                    number=len(found),
                    place=place,
                    sender=each,
                    receiver=receiver,
                    tag=tag,
                    dtype=dtype,
                    received_as=received_as,
                    shape=shape,
                    fault=fault if number == 0 else "",
                    is_from_any=is_from_any,
                )
            )
    return found


class Program:
    """One rank's run of the program of a seed."""

    def __init__(self, here: Here, seed: int, groups: list[Any], ranks: list[list[int]], failing: Failing) -> None:
        self.rank, self.seed, self.groups, self.failing = here.rank, seed, groups, failing
        self.own = random.Random(f"{seed} {here.rank}")  # noqa: S311 -- no secret
        self.messages = messages_of(seed, ranks)
        own, count = torch.cuda.current_device(), torch.cuda.device_count()
        self.devices = [torch.device("cuda", (own + each) % count) for each in range(count)]
        self.streams = {each: [torch.cuda.default_stream(each), torch.cuda.Stream(each)] for each in self.devices}
        self.found = Outcomes()
        self.waits: list[Callable[[], None]] = []
        self.collectives = 0

    def values(self, message: Message) -> Tensor:
        """Return what the message has."""
        generator = np.random.default_rng((self.seed, message.number))
        drawn = np.asarray(generator.integers(0, 100, message.shape), np.float64)
        if message.is_from_any and message.shape:  # the first element says which message it is
            drawn.reshape(-1)[:1] = message.number
        return torch.from_numpy(drawn).to(message.dtype)

    def tensor(self, values: Tensor) -> tuple[Tensor, torch.cuda.Stream]:
        """Return a tensor that its stream writes late, or a host tensor; and the stream."""
        device = self.devices[0] if self.own.random() < 0.7 else self.own.choice(self.devices)
        stream = self.own.choice(self.streams[device])
        if self.own.random() < 0.15:
            return values.clone(), stream
        with torch.cuda.stream(stream):
            torch.full(values.shape, 9, dtype=values.dtype, device=device)  # memory that is free, and written late
            if self.own.random() < 0.2 and values.ndim:
                return late(torch.stack([values, values], -1).to(device))[..., 0], stream
            return late(values.to(device)), stream

    def run(self) -> None:
        """Run the program."""
        for message in self.messages:
            if self.own.random() < 0.1:
                self.refuse()
            if message.sender == self.rank:
                self.send(message)
            elif message.receiver == self.rank:
                self.receive(message)
            while self.waits and self.own.random() < 0.3:
                self.waits.pop(self.own.randrange(len(self.waits)))()
            if message.number % 13 == 12:
                self.add_up()
        self.own.shuffle(self.waits)
        while self.waits:
            self.waits.pop()()
        self.add_up()

    def add_up(self) -> None:
        """Reduce over all ranks, between the messages."""
        self.collectives += 1
        total = torch.full((100,), float(self.rank + self.collectives), device=self.devices[0])
        dist.all_reduce(total)
        size = dist.get_world_size()
        assert total.cpu().eq(sum(range(size)) + size * self.collectives).all(), (self.seed, "all_reduce")

    def refuse(self) -> None:
        """Make a call that is refused here, and is no message."""
        other = (self.rank + 1) % dist.get_world_size()
        if other == self.rank:
            return
        tensor = torch.ones(5, device=self.devices[0])
        sparse = torch.eye(3).to_sparse()  # of the host: the stand-ins have few operators for sparse tensors
        calls: list[Callable[[], Any]] = [
            lambda: dist.send(tensor, other, tag=-3),
            lambda: dist.irecv(tensor, other, tag=-1),
            lambda: dist.isend(tensor, other, tag=1 << 63),
            lambda: dist.recv(tensor, other, tag=1 << 70),
            lambda: dist.irecv(tensor, None, tag=1 << 63),
            lambda: dist.irecv(tensor, None, tag=-1),
            lambda: dist.send(tensor, other, tag=1.5),
            lambda: dist.isend(tensor, dist.get_world_size() + 3),
            lambda: dist.isend(sparse, other),
            lambda: dist.irecv(torch.ones(1, device=self.devices[0]).expand(4), other),
            lambda: dist.irecv([tensor], other),
        ]
        call = self.own.choice(calls)

        def waited() -> None:
            work = call()
            if work is not None and not isinstance(work, int):
                work.wait()

        with pytest.raises((RuntimeError, ValueError, TypeError)):
            waited()

    def send(self, message: Message) -> None:
        tensor, stream = self.tensor(self.values(message))
        group, waits = self.groups[message.place], self.own.random() < 0.4
        call = dist.send if waits else dist.isend

        fails = message.fault == "sender's memory"
        work = self.tried(
            message, self.found.sent, fails, stream, partial(call, tensor, message.receiver, group, message.tag)
        )
        del tensor
        self.litter(stream)
        if message.number in self.found.sent:
            return
        if waits:
            self.found.sent[message.number] = RIGHT
        elif self.own.random() < 0.15:
            self.found.sent[message.number] = DROPPED
        else:
            self.waits.append(lambda: self.end(message, self.found.sent, work, None))

    def receive(self, message: Message) -> None:
        shape = (*message.shape, 2) if message.fault == "size" else message.shape
        empty = torch.zeros(shape, dtype=message.received_as)
        tensor, stream = self.tensor(empty)
        group, waits = self.groups[message.place], self.own.random() < 0.4
        source = None if message.is_from_any else message.sender
        call = dist.recv if waits else dist.irecv

        fails = message.fault == "receiver's memory"
        work = self.tried(
            message, self.found.received, fails, stream, partial(call, tensor, source, group, message.tag)
        )
        if message.number in self.found.received:
            return
        if waits:
            with torch.cuda.stream(stream):
                self.compare(message, tensor, work)
        elif self.own.random() < 0.1 and not message.is_from_any:
            del tensor
            self.litter(stream)
            self.found.received[message.number] = DROPPED
        else:
            self.waits.append(lambda: self.end(message, self.found.received, work, tensor))

    def tried(
        self,
        message: Message,
        outcomes: dict[int, str],
        fails: bool,  # noqa: FBT001
        stream: torch.cuda.Stream,
        call: Callable[[], Any],
    ) -> Any:
        """Make a call on a stream, with `fails` one in which CUDA fails; record its error."""
        if fails:
            self.failing.code = self.own.choice((INVALID_VALUE, OUT_OF_MEMORY))
            self.failing.begin(self.own.randrange(5))
        try:
            with torch.cuda.stream(stream):
                return call()
        except Exception as error:  # noqa: BLE001 -- of any library
            outcomes[message.number] = f"{type(error).__name__}: {error}"
            return None
        finally:
            if fails and self.failing.end():
                self.found.failed.add(message.number)

    def end(self, message: Message, outcomes: dict[int, str], work: Any, tensor: Tensor | None) -> None:
        """Wait for a message on a stream; record its end, and compare what it has brought."""
        chosen = self.own.choice(
            self.streams[self.devices[0] if tensor is None or not tensor.is_cuda else tensor.device]
        )
        with torch.cuda.stream(chosen):
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 -- of any library
                outcomes[message.number] = f"{type(error).__name__}: {error}"
                return
            if tensor is None:
                outcomes[message.number] = RIGHT
                return
            source = work._source_rank() if message.is_from_any else None
            if source is not None:
                source = dist.get_global_rank(self.groups[message.place] or dist.group.WORLD, source)
            self.compare(message, tensor, source)

    def compare(self, message: Message, tensor: Tensor, source: int | None) -> None:
        """Compare a received tensor on the current stream with what was sent."""
        kept = late(tensor) if tensor.is_cuda else tensor
        found = kept.cpu().contiguous().reshape(-1).view(torch.uint8)
        self.litter(torch.cuda.current_stream())
        sent = [message]
        if message.is_from_any:
            assert source is not None
            key = message.place, message.receiver, message.tag
            sent = [each for each in self.messages if (each.place, each.receiver, each.tag) == key]
            assert source in {each.sender for each in sent}, (self.seed, message, source)
            sent = [each for each in sent if each.sender == source]
        wanted = [self.values(each).reshape(-1).view(torch.uint8) for each in sent]
        is_right = any(torch.equal(found, each) for each in wanted)
        assert is_right, (self.seed, message, tensor.device, found[:40], [each[:40] for each in wanted])
        self.found.received[message.number] = RIGHT

    def litter(self, stream: torch.cuda.Stream) -> None:
        """Write to memory that the program has freed on a device."""
        with torch.cuda.stream(self.own.choice(self.streams[stream.device])):
            torch.full(self.own.choice(SHAPES), 9.0, device=stream.device)


def judge(seed: int, messages: list[Message], every: list[Outcomes]) -> Counter[str]:
    """Compare what became of each message on its two ranks; return how many messages there were of each kind."""
    failed = set().union(*(each.failed for each in every))
    # Behind a message that has failed, the others of its channel are right on both ranks, or fail on both.
    spoilt = {each.channel for each in messages if each.number in failed or each.fault == "size"}
    of_any: dict[tuple[int, int, int], list[Message]] = defaultdict(list)
    for each in messages:
        if each.is_from_any:
            of_any[each.place, each.receiver, each.tag].append(each)
            continue
        sent, received = every[each.sender].sent[each.number], every[each.receiver].received[each.number]
        told = (seed, each, sent, received, each.number in failed)
        for end in (sent, received):
            assert "timed out" not in end, told
            assert "StallError" not in end, told
        is_sent, is_received = sent in (RIGHT, DROPPED), received in (RIGHT, DROPPED)
        if each.channel not in spoilt:
            assert is_sent, told
            assert is_received, told
        elif each.fault == "size":
            assert received != RIGHT, told
        elif each.number in failed:  # multiring may have tried again; and a message may leave before its receiver fails
            if each.fault == "sender's memory":
                assert is_sent == is_received or DROPPED in (sent, received), told
            else:
                assert is_sent or not is_received or received == DROPPED, told
            other = received if each.fault == "sender's memory" else sent
            culprit = each.sender if each.fault == "sender's memory" else each.receiver
            assert other in (RIGHT, DROPPED) or f"rank {culprit}" in other, told
        else:
            assert is_sent == is_received or DROPPED in (sent, received), told
    for group in of_any.values():
        receiver = group[0].receiver
        ends = Counter(every[receiver].received[each.number] == RIGHT for each in group)
        sent_right = sum(every[each.sender].sent[each.number] in (RIGHT, DROPPED) for each in group)
        told_of_any = (seed, group, [every[receiver].received[each.number] for each in group], failed)
        bad = sum(each.number in failed for each in group)
        assert ends[False] <= bad, told_of_any
        if not bad:
            assert sent_right == len(group), told_of_any
    errors = [
        {RIGHT, DROPPED}.isdisjoint({every[each.sender].sent[each.number], every[each.receiver].received[each.number]})
        for each in messages
    ]
    return Counter(
        {
            "messages": len(messages),
            "from any rank": sum(each.is_from_any for each in messages),
            "calls of CUDA failed": len(failed),
            "of another size": sum(each.fault == "size" for each in messages),
            "errors on both ranks": sum(errors),
        }
    )


def run_message_programs(here: Here, seeds: list[int], folder: str) -> dict[str, int]:
    """Run the programs of some seeds; return how many messages there were of each kind."""
    counts: Counter[str] = Counter()
    join(here, stall_timeout_s=LIMIT_S)
    failing = Failing(everywhere=False)
    for seed in seeds:
        join_torch(here, str(Path(folder) / f"meet{seed}"), timeout_s=LIMIT_S)
        everybody = list(range(here.size))
        parts = [everybody[:2], everybody[1:], everybody[::2]] if here.size > 2 else [everybody]
        groups = [dist.new_group(ranks) for ranks in parts]
        program = Program(here, seed, [None, *groups], [everybody, *parts], failing)
        error: BaseException | None = None
        try:
            program.run()
        except BaseException as caught:  # noqa: BLE001 -- raised below, after the others know
            error = caught
        every = mt.allgather_object((program.found, None if error is None else repr(error)))
        if error is not None:
            raise error
        assert [text for _, text in every if text] == [], seed
        counts += judge(seed, program.messages, [found for found, _ in every])
        assert not failing.kept, (seed, failing.kept)
        dist.barrier()
        with suppress(RuntimeError):  # a group whose messages have failed may say so
            dist.destroy_process_group()
    return dict(counts)
