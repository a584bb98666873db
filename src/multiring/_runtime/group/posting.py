"""Calls: the machinery that all operations of a group share.

The machinery numbers the operations, makes the descriptor on which the ranks agree, and keeps the memory alive while an
operation is in flight. If a rank's arguments are wrong, it reports the error to the other ranks.
"""

import hashlib
import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from multiring._native import (
    Context,
    Holdings,
    Lowering,
    Operation,
    OperationSpec,
    Program,
    Repeats,
    Rounds,
    SharedSlots,
)
from multiring._runtime.arrays import Buffer, buffer_of, copied, numpy_dtype
from multiring._runtime.engines.contract import Engine
from multiring._runtime.events import NAMES, STEPS
from multiring._runtime.failures.control_thread import Control
from multiring._runtime.group.compile import AT_ONCE_MOST, Programs, Request, agreement_rounds, direct_rounds
from multiring._runtime.group.generation_end import GenerationEnd
from multiring._runtime.group.handles import NOBODY, Attention, OperationHandle, Posted, StatusSource
from multiring._runtime.named.signature_text import LABELLED
from multiring._runtime.rails.watch import CHECK_EVERY, LEAST_BYTES, Watch
from multiring._schedule import Collective
from multiring._topology import Topology, grid_of
from multiring.errors import StallError, StateError
from multiring.planner import Pins, Plan, Task
from multiring.trace import Glossary

_NAME_INDEX = {name: index for index, name in enumerate(NAMES)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessServices:
    """The objects and settings that all groups of one process share."""

    context: Context
    holdings: Holdings
    world_rank: int  # this process's number in the native core: its rank in the job's first generation
    stall_warn_s: float
    stall_timeout_s: float
    rank_status: StatusSource = NOBODY
    control: Control | None = None  # the control thread; None if there are no other ranks
    glossary: Glossary
    pins: Pins | None = None
    replan: bool = True
    rank_of_id: Mapping[int, int] | None = None  # the job's ranks by their numbers in the core; None if both are equal
    between_hosts: str = "tcp"  # the transport between hosts, as `Plan.engine` names it
    seals: bool = False  # whether connections to other hosts are encrypted; see MULTIRING_SEAL
    device_path: str = "auto"  # how CUDA tensors are reduced; see MULTIRING_DEVICE_PATH
    spin_s: float = 0.0  # how long callers spin before they sleep, if they wait only for ranks of their own host
    generation: GenerationEnd = field(default_factory=GenerationEnd)  # whether the ranks have gone on

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Disable spinning in this process inside the block.

        Callers then behave as if they waited for other hosts.
        """
        self.context.allow_spin(0.0)
        try:
            yield
        finally:
            self.context.allow_spin(self.spin_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """An operation's number and the ranks that must agree on it."""

    name: str
    key: tuple[int, int]
    members: Sequence[int]  # world ranks
    rounds: Rounds
    at_once: bool  # all rounds run at the same time: every rank sends to every other rank
    slots: SharedSlots | None = None  # the group's slots for small messages
    label: str = ""  # a text of the caller on which the ranks must also agree

    @property
    def number(self) -> int:
        """The operation's number in its group.

        A message is numbered among those of equal sender, receiver and tag.
        """
        return self.key[1] // STEPS

    def titled(self, title: str) -> str:
        """Return `title` with the label appended. The ranks agree on this text."""
        return f"{title}{LABELLED}{self.label}" if self.label else title

    def step(self, index: int, name: str) -> "Call":
        """Return the call of the same operation's step `index`, 0 to STEPS - 1.

        This call is step 0.
        """
        return replace(self, name=name, key=(self.key[0], self.key[1] + index))


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The program and memory of an operation. A barrier has neither."""

    program: Program | None = None
    plan: Plan | None = None
    plan_digest: bytes = b""
    meets: bool = False  # whether the operation can run in the shared slots
    size_bytes: int = 0
    repeated: tuple[Any, str] | None = None  # (array, op) of a repeatable call; the array is None for a barrier
    input: Buffer | None = None
    output: Buffer | None = None
    result: Any = None


class Calls:
    """The operations of one group on this rank."""

    engine: Engine | None = None  # the engine that runs the collectives; None for the native core
    buffer_of = staticmethod(buffer_of)
    copied = staticmethod(copied)

    def __init__(self, services: ProcessServices, ranks: tuple[int, ...], topology: Topology, key: bytes) -> None:
        self.services = services
        self.ranks = ranks
        self.own = ranks.index(services.world_rank)
        self.grid, order = grid_of(topology)
        self.programs = Programs(topology, self.own, ranks, services.pins, services.between_hosts)
        self._key = key
        self.id = identifier(key)
        services.glossary.groups[self.id] = ranks_in_words(ranks)
        self._at_once = len(topology.hosts) == 1 and len(ranks) <= AT_ONCE_MOST
        pairs = direct_rounds(len(ranks), self.own) if self._at_once else agreement_rounds(self.grid, order, self.own)
        self._rounds = Rounds([(ranks[to], ranks[source]) for to, source in pairs])
        self._lock = threading.Lock()
        self._attention = Attention.of(
            services.context, services.holdings, services.rank_status, services.stall_warn_s, services.generation
        )
        meets = self._at_once and len(ranks) > 1
        slots = SharedSlots(services.context, list(ranks), STEPS) if meets else None
        if slots is not None:
            services.generation.note_slots(slots)
        watches = services.replan and len(topology.hosts) > 1
        by_mpi = services.between_hosts == "mpi"
        self._watch = Watch(services.context, ranks, self.own, topology, by_mpi=by_mpi) if watches else None
        self._topology = topology
        self.repeats = Repeats(
            services.holdings,
            self.id,
            slots,
            STEPS,
            self._attention.look_s,
            CHECK_EVERY if watches else 0,
            array_type=np.ndarray,
        )
        self._messages: dict[tuple[int, int, int], int] = {}
        self._edition = 0
        self._twins = itertools.count()
        self._latest: Operation | None = None
        services.rank_status.know(self)

    @property
    def last(self) -> int:
        """The number of the latest operation; 0 if the group has had none."""
        return self.repeats.last // STEPS

    def next(self, name: str, label: str = "") -> Call:
        """Return the group's next call.

        The order of calls of this method must be the same on all ranks.
        """
        self._refuse_over(name)
        call = Call(
            name=name,
            key=(self.id, self.repeats.next()),
            members=self.ranks,
            rounds=self._rounds,
            at_once=self._at_once,
            slots=self.repeats.slots,
            label=label,
        )
        if self._watch is not None and call.number % CHECK_EVERY == 0:
            with self.telling(call):
                self._check(self._watch, call)
        return call

    def _check(self, watch: Watch, call: Call) -> None:
        """Evaluate the measurements since the last check, and gather the next ones.

        This rank waits until all ranks have come to the operation of the last check, CHECK_EVERY operations ago.
        """
        if watch.gathering is not None:
            handle, table = watch.gathering
            watch.gathering = None
            handle.wait()
            finding = watch.check(table)
            if finding is not None:
                with self._lock:
                    self.programs.replan(finding.constants.applied(self._topology))
                self._forget()
        with self._lock:
            own = watch.row()
        table = np.zeros((len(self.ranks), len(own)))
        counts = (len(own),) * len(self.ranks)
        request = Request(Collective.ALL_GATHER, "float64", counts, table.size, agreed="measures")
        key = (identifier(self._key, "measures"), call.key[1])  # a separate order, so that no other operation waits
        place = replace(call, name="measures", key=key, slots=None, label="")
        buffers = buffer_of(own, writes=False), buffer_of(table, writes=True)
        watch.gathering = self.run(place, "measures", request, buffers, None, waits=False), table

    def message(self, name: str, sender: int, receiver: int, tag: int) -> Call:
        """Return the call of the next message from `sender` to `receiver` under `tag`.

        This rank is one of the two.
        """
        self._refuse_over(name)
        with self._lock:
            number = self._messages.get((sender, receiver, tag), 0)
            self._messages[sender, receiver, tag] = number + STEPS
        peer = self.ranks[receiver if self.own == sender else sender]
        key = (identifier(self._key, "message", sender, receiver, tag), number)
        members = (self.ranks[self.own], peer)
        return Call(name=name, key=key, members=members, rounds=Rounds([(peer, peer)]), at_once=False)

    def message_program(self, sender: int, receiver: int, count: int, dtype: str) -> Program:
        """Return the program of a message between this rank and another rank of the group."""
        with self._lock:
            return self.programs.message(sender, receiver, count, dtype)

    def decline(self, label: str, error: Exception) -> None:
        """Report `error` as this rank's part in the group's next operation.

        The other ranks then raise.
        """
        self._tell(self.next("barrier", label), error)

    def decline_message(self, name: str, sender: int, receiver: int, tag: int, error: Exception) -> None:
        """Report `error` as this rank's part in the next message between two ranks, of which it is one.

        `name` is "send" or "recv". The other rank then raises.
        """
        self._tell(self.message(name, sender, receiver, tag), error)

    @contextmanager
    def telling(self, call: Call) -> Iterator[None]:
        """Report a failure of the block to the other ranks of `call`.

        The other ranks then raise instead of waiting.
        """
        try:
            yield
        except (StateError, StallError):  # no other rank can be reached
            raise
        except Exception as error:
            self._tell(call, error)
            raise
        except BaseException as error:  # on Ctrl-C, after the operation was posted, the other ranks need no report
            with suppress(StateError):
                self._tell(call, error)
            raise

    def _tell(self, call: Call, error: BaseException) -> None:
        self.post(call, failure_text(call.name, error), Work(), waits=False)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a new, uninitialized array in shared memory."""
        kind = numpy_dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        return self.services.context.allocate(size)[:size].view(kind).reshape(shape)

    def run(
        self,
        call: Call,
        title: str,
        request: Request,
        buffers: tuple[Buffer | None, Buffer],
        result: Any,
        *,
        waits: bool,
    ) -> OperationHandle:
        """Start the program of `request` on the buffers (input, output); see `post`."""
        with self._lock:
            compiled = self.programs.get(request)
            size_bytes = request.total * numpy_dtype(request.dtype).itemsize
            is_watched = (
                self._watch is not None and request.collective is Collective.ALL_REDUCE and size_bytes >= LEAST_BYTES
            )
            predicted_s = self.programs.predicted(request) if is_watched else 0.0
        work = Work(
            program=compiled.program,
            plan=compiled.plan,
            plan_digest=compiled.digest,
            meets=compiled.lowering is Lowering.EXCHANGE and size_bytes <= SharedSlots.CAPACITY,
            repeated=(buffers[1].owner, request.op) if _may_repeat(request) and not is_watched else None,
            size_bytes=size_bytes,
            input=buffers[0],
            output=buffers[1],
            result=result,
        )
        handle = self.post(call, title, work, waits=waits)
        if is_watched and self._watch is not None:
            with self._lock:
                self._watch.add(handle.operation, predicted_s)
        return handle

    def post(self, call: Call, title: str, work: Work, *, waits: bool) -> OperationHandle:
        """Post `work`.

        The operation starts once all ranks of `call` have posted it with the same title and plan. `title` describes in
        words the properties on which the ranks must agree. After a mismatch, the other ranks' errors show the title.
        `waits` promises that this thread waits for the handle next, which saves waking another thread.
        """
        title = call.titled(title)
        services = self.services
        digest = hashlib.blake2b(title.encode() + work.plan_digest, digest_size=16).digest()
        services.glossary.note(digest, title, work.plan, self._carrier_of(work))
        spec = OperationSpec(
            key=call.key,
            members=call.members,
            rounds=call.rounds,
            at_once=call.at_once,
            digest=digest,
            description=title,
            program=work.program,
            input=work.input.address if work.input else 0,
            output=work.output.address if work.output else 0,
            user_bytes=work.size_bytes,
            name=_NAME_INDEX[call.name],
            slots=call.slots,
            meets=work.meets and waits,
            tells_mismatch=bool(call.label),
        )
        memory = work.input, work.output
        self._refuse_over(title)
        self._latest = operation = services.holdings.post(spec, waits, memory)
        if services.generation.is_over:  # it ended meanwhile: perhaps no other rank will post this operation
            services.context.abort(operation, services.world_rank)
        handle = self._handle_of(operation, title, work.result, call.key[0])
        if waits and work.repeated is not None:
            if self._watch is None:
                handle.posted = Posted(spec, memory, title, work.result, self._edition)
            if not call.label:  # `again` does not compare labels
                self.repeats.remember(spec, *work.repeated)
        return handle

    def _refuse_over(self, title: str) -> None:
        if self.services.generation.is_over:
            raise self.services.generation.error(title)

    def _carrier_of(self, work: Work) -> str:
        """Return the name of the engine that moves the data; "" if the native core does, or there are none."""
        return "" if self.engine is None or work.program is not None or work.plan is None else self.engine.name

    def post_again(self, posted: Posted) -> OperationHandle | None:
        """Post an earlier operation again, as the group's next operation.

        Memory and label stay the same. Return None, and post nothing, if the plans may have changed since. This thread
        must wait for the handle next.
        """
        if posted.edition != self._edition or self.services.generation.is_over:
            return None
        self._latest = operation = self.repeats.post_again(posted.spec, posted.memory)
        return self._handle_of(operation, posted.title, posted.result, self.id)

    def _forget(self) -> None:
        self.repeats.forget()
        self._edition += 1

    def again(self, name: str, array: Any = None, op: str = "sum") -> bool:
        """Repeat an earlier blocking call cheaply.

        If there was no such call, return False and change nothing.
        """
        if self.services.generation.is_over:
            return False
        index = _NAME_INDEX[name]
        found = self.repeats.barrier(index) if array is None else self.repeats.all_reduce(index, array, op)
        if found is None:
            return False
        if isinstance(found, Operation):
            self._handle_of(found, found.title, None, self.id).wait()
        return True

    def _handle_of(self, operation: Operation, title: str, result: Any, line: int) -> OperationHandle:
        return OperationHandle(operation, title, self.ranks, result, self._attention, line)

    @property
    def latest(self) -> OperationHandle:
        """A handle, without a result, of the operation that was posted last, in flight or ended."""
        if self._latest is None:
            raise StateError("no operation was posted yet")
        return self._handle_of(self._latest, self._latest.title, None, self.id)

    @property
    def plans(self) -> dict[Task, Plan]:
        """The plans made so far, by task."""
        with self._lock:
            return dict(self.programs.plans)

    def use(self, task: Task, plan: Plan) -> None:
        """Use `plan` for `task` from now on.

        Every rank must do the same, between the same two operations.
        """
        with self._lock:
            self.programs.use(task, plan)
        self._forget()

    def plan_of(self, request: Request) -> Plan:
        """Return the plan with which `request` runs."""
        with self._lock:
            return self.programs.plan(request)

    def twin_key(self) -> bytes:
        """Return the key of the next twin of this group, the same on every rank."""
        return hashlib.blake2b(self._key + repr(("twin", next(self._twins))).encode(), digest_size=16).digest()

    def subgroup_key(self, call: Call, ranks: Sequence[int]) -> bytes:
        """Return the key of the group of `ranks` that `call` makes.

        The key is the same on every rank.
        """
        return hashlib.blake2b(self._key + repr((call.number, tuple(ranks))).encode(), digest_size=16).digest()

    def purpose_id(self, purpose: str) -> int:
        """Return the id of this group's control messages for `purpose`.

        The id is the same on every rank.
        """
        return identifier(self._key, "purpose", purpose)

    def purpose_key(self, purpose: str) -> bytes:
        """Return the key of the group of the same ranks for `purpose`.

        The key is the same on every rank.
        """
        return hashlib.blake2b(self._key + repr(("purpose", purpose)).encode(), digest_size=16).digest()


def failure_text(name: str, error: BaseException) -> str:
    """Return the title of an operation in which a rank cannot take part because of `error`."""
    return f"{name} failed with {type(error).__name__}: {error}"


def _may_repeat(request: Request) -> bool:
    """Return whether a call can be recognized by its array and its reduction alone."""
    return request.collective is Collective.ALL_REDUCE and not request.wire


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0-7" or "ranks 0, 2, 5"."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) == 1:
        return f"rank {first}"
    in_a_row = tuple(ranks) == tuple(range(first, last + 1))
    return f"ranks {first}-{last}" if in_a_row else f"ranks {', '.join(map(str, ranks))}"


def identifier(key: bytes, *parts: object) -> int:
    """Return the 64-bit id of a group, or of a sequence of operations in it."""
    return int.from_bytes(hashlib.blake2b(key + repr(parts).encode(), digest_size=8).digest(), "little")
