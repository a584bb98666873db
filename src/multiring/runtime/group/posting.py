"""Calls: what all operations of a group have in common, whatever they compute.

Their order, the descriptor the ranks agree on, what is held while they are in flight, and how a rank whose
arguments are wrong tells the others.
"""

import hashlib
import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
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
from multiring.errors import StallError, StateError
from multiring.planner import Pins, Plan, Task
from multiring.runtime.arrays import Buffer, buffer_of, copied, numpy_dtype
from multiring.runtime.engines.contract import Engine
from multiring.runtime.events import NAMES, STEPS
from multiring.runtime.failures.control_thread import Control
from multiring.runtime.group.compile import AT_ONCE_MOST, Programs, Request, agreement_rounds, direct_rounds
from multiring.runtime.group.handles import NOBODY, Attention, Lookout, OperationHandle, Posted, PostedOperation
from multiring.runtime.named.signature_text import LABELLED
from multiring.runtime.rails.watch import CHECK_EVERY, LEAST_BYTES, Watch
from multiring.schedule import Collective
from multiring.topology import Topology, grid_of
from multiring.trace import Glossary

_NAME_INDEX = {name: index for index, name in enumerate(NAMES)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessServices:
    """What every group of one process shares."""

    context: Context
    holdings: Holdings
    world_rank: int  # what the native core calls this process: its rank in the first generation of the job
    stall_warn_s: float
    stall_timeout_s: float
    lookout: Lookout = NOBODY
    control: Control | None = None  # where there are other ranks
    glossary: Glossary
    pins: Pins | None = None
    replan: bool = True
    rank_of_id: Mapping[int, int] | None = None  # each rank of the job by what the core calls it; None: it is that
    between_hosts: str = "tcp"  # what carries bytes there, in `Plan.engine`'s words
    spin_s: float = 0.0  # how long callers spin before they sleep, where all that they wait for is on their host

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Let no caller of this process spin meanwhile; it is as if each waited for other hosts."""
        self.context.allow_spin(0.0)
        try:
            yield
        finally:
            self.context.allow_spin(self.spin_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One operation's place: its number, and the ranks it is agreed with."""

    name: str
    key: tuple[int, int]
    members: Sequence[int]  # world ranks
    rounds: Rounds
    at_once: bool  # all rounds at the same time: every rank tells every other
    slots: SharedSlots | None = None  # the group's slots for small messages
    label: str = ""  # the caller's own part of what the ranks agree on

    @property
    def number(self) -> int:
        """The operation's place among those of its group, or of its line of messages."""
        return self.key[1] // STEPS

    def titled(self, title: str) -> str:
        """Return `title` with the label, as the ranks agree on it."""
        return f"{title}{LABELLED}{self.label}" if self.label else title

    def step(self, index: int, name: str) -> "Call":
        """Return the place of the same operation's step `index`, below STEPS; this is step 0."""
        return replace(self, name=name, key=(self.key[0], self.key[1] + index))


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What an operation does once it is agreed on; nothing, for a barrier."""

    program: Program | None = None
    plan: Plan | None = None
    plan_digest: bytes = b""
    meets: bool = False  # whether it can be done in the slots
    size_bytes: int = 0
    repeated: tuple[Any, str] | None = None  # (array, op) of a call that may come again; array None: of a barrier
    input: Buffer | None = None
    output: Buffer | None = None
    result: Any = None


class Calls:
    """The operations of one group on this rank."""

    engine: Engine | None = None  # what carries out collectives, other than the native core
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
        self._attention = Attention.of(services.lookout, services.stall_warn_s)
        meets = self._at_once and len(ranks) > 1
        slots = SharedSlots(services.context, list(ranks), STEPS) if meets else None
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
        self._latest: PostedOperation | None = None
        services.lookout.know(self)

    @property
    def last(self) -> int:
        """The number of the operation that came last; 0: none has come."""
        return self.repeats.last // STEPS

    def next(self, name: str, label: str = "") -> Call:
        """Return the group's next operation; the order of these calls is the order the ranks agree on."""
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
        """Act on what was gathered since the last check, and begin to gather for the next one.

        The wait is for all ranks to have come to the operation of the last check, CHECK_EVERY operations ago.
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
        key = (identifier(self._key, "measures"), call.key[1])  # a line of its own, which no other operation waits for
        place = replace(call, name="measures", key=key, slots=None, label="")
        buffers = buffer_of(own, writes=False), buffer_of(table, writes=True)
        watch.gathering = self.run(place, "measures", request, buffers, None, waits=False), table

    def message(self, name: str, sender: int, receiver: int, tag: int) -> Call:
        """Return the next message from `sender` to `receiver` under `tag`; one of them is this rank."""
        with self._lock:
            number = self._messages.get((sender, receiver, tag), 0)
            self._messages[sender, receiver, tag] = number + STEPS
        peer = self.ranks[receiver if self.own == sender else sender]
        key = (identifier(self._key, "message", sender, receiver, tag), number)
        members = (self.ranks[self.own], peer)
        return Call(name=name, key=key, members=members, rounds=Rounds([(peer, peer)]), at_once=False)

    def message_program(self, sender: int, receiver: int, count: int, dtype: str) -> Program:
        """Return the program of a message between two ranks of the group, one of them this one."""
        with self._lock:
            return self.programs.message(sender, receiver, count, dtype)

    def decline(self, label: str, error: Exception) -> None:
        """Take part in the group's next operation by telling the others that this rank cannot: they raise."""
        self._tell(self.next("barrier", label), error)

    @contextmanager
    def telling(self, call: Call) -> Iterator[None]:
        """Tell the other ranks of `call` when the block fails here: they raise instead of waiting for this one."""
        try:
            yield
        except (StateError, StallError):  # there is nobody to talk to
            raise
        except Exception as error:
            self._tell(call, error)
            raise
        except BaseException as error:  # Ctrl-C; where it came behind the posting, there is nothing to tell
            with suppress(StateError):
                self._tell(call, error)
            raise

    def _tell(self, call: Call, error: BaseException) -> None:
        self.post(call, f"{call.name} failed with {type(error).__name__}: {error}", Work(), waits=False)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an array in the arena whose contents are undefined."""
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
        """Start the program of `request` on (input, output); see `post`."""
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
        """Start `work`, once all ranks of `call` have come with the same title and plan.

        `title` says in words what the ranks must agree on; other ranks are shown it where they do not. `waits` says
        that this thread waits for the handle next, so that no other need be woken.
        """
        title = call.titled(title)
        services = self.services
        digest = hashlib.blake2b(title.encode() + work.plan_digest, digest_size=16).digest()
        services.glossary.note(digest, title, work.plan)
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
        operation = services.holdings.post(spec, waits, memory)
        self._latest = posted_operation = PostedOperation(services.context, services.holdings, operation)
        handle = self._handle_of(posted_operation, title, work.result, call.key[0])
        if waits and work.repeated is not None:
            if self._watch is None:
                handle.posted = Posted(spec, memory, title, work.result, self._edition)
            if not call.label:  # which `again` does not know
                self.repeats.remember(spec, *work.repeated)
        return handle

    def post_again(self, posted: Posted) -> OperationHandle | None:
        """Start as the group's next operation what was posted before; None: plans may have changed since.

        Its memory, and its label, are what they were. This thread waits for the handle next.
        """
        if posted.edition != self._edition:
            return None
        operation = self.repeats.post_again(posted.spec, posted.memory)
        services = self.services
        posted_operation = PostedOperation(services.context, services.holdings, operation)
        self._latest = posted_operation
        return self._handle_of(posted_operation, posted.title, posted.result, self.id)

    def _forget(self) -> None:
        self.repeats.forget()
        self._edition += 1

    def again(self, name: str, array: Any = None, op: str = "sum") -> bool:
        """Make a blocking call that was made before, which is cheap; False: it was not, and nothing was done."""
        index = _NAME_INDEX[name]
        found = self.repeats.barrier(index) if array is None else self.repeats.all_reduce(index, array, op)
        if found is None:
            return False
        if isinstance(found, Operation):
            self._resume(found).wait()
        return True

    def _resume(self, operation: Operation) -> OperationHandle:
        """Return the handle of a repeated call that is still in flight, or has failed."""
        posted_operation = PostedOperation(self.services.context, self.services.holdings, operation)
        return self._handle_of(posted_operation, operation.title, None, self.id)

    def _handle_of(self, posted_operation: PostedOperation, title: str, result: Any, line: int) -> OperationHandle:
        return OperationHandle(posted_operation, title, self.ranks, result, self._attention, line)

    @property
    def latest(self) -> PostedOperation:
        """The operation posted last, ended or not; for tests and tools."""
        if self._latest is None:
            raise StateError("no operation was posted yet")
        return self._latest

    @property
    def plans(self) -> dict[Task, Plan]:
        """What was planned so far, and how."""
        with self._lock:
            return dict(self.programs.plans)

    def use(self, task: Task, plan: Plan) -> None:
        """Run `plan` for `task` from now on; every rank of the group does the same, between two operations."""
        with self._lock:
            self.programs.use(task, plan)
        self._forget()

    def plan_of(self, request: Request) -> Plan:
        """Return the plan that runs for `request`."""
        with self._lock:
            return self.programs.plan(request)

    def twin_key(self) -> bytes:
        """Return what names the next group of the same ranks, the same on every rank."""
        return hashlib.blake2b(self._key + repr(("twin", next(self._twins))).encode(), digest_size=16).digest()

    def subgroup_key(self, call: Call, ranks: Sequence[int]) -> bytes:
        """Return what names the group that `call` makes of `ranks`, the same on every rank."""
        return hashlib.blake2b(self._key + repr((call.number, tuple(ranks))).encode(), digest_size=16).digest()

    def purpose_id(self, purpose: str) -> int:
        """Return what names the notices of this group for `purpose`, the same on every rank."""
        return identifier(self._key, "purpose", purpose)

    def purpose_key(self, purpose: str) -> bytes:
        """Return what names the group of the same ranks for `purpose`, the same on every rank."""
        return hashlib.blake2b(self._key + repr(("purpose", purpose)).encode(), digest_size=16).digest()


def _may_repeat(request: Request) -> bool:
    """Whether a call can be known again by its array and its operation alone."""
    return request.collective is Collective.ALL_REDUCE and not request.wire


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0-7" or "ranks 0, 2, 5"."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) == 1:
        return f"rank {first}"
    in_a_row = tuple(ranks) == tuple(range(first, last + 1))
    return f"ranks {first}-{last}" if in_a_row else f"ranks {', '.join(map(str, ranks))}"


def identifier(key: bytes, *parts: object) -> int:
    """Return 64 bits that name a group, or a line of messages in it."""
    return int.from_bytes(hashlib.blake2b(key + repr(parts).encode(), digest_size=8).digest(), "little")
