"""multiring's compiled core; import it through multiring._native."""

from collections.abc import Callable, Sequence
import enum
from typing import Annotated, Final

import numpy
from numpy.typing import NDArray
from typing_extensions import CapsuleType

VERSION: str = "0.2.0"

class FaultKind(enum.Enum):
    NONE = 0

    ARGUMENT = 1

    MISMATCH = 2

    PEER_LOST = 3

    STALL = 4

    STATE = 5

    RENDEZVOUS = 6

class DType(enum.Enum):
    int8 = 0

    int16 = 1

    int32 = 2

    int64 = 3

    uint8 = 4

    uint16 = 5

    uint32 = 6

    uint64 = 7

    float16 = 8

    bfloat16 = 9

    float32 = 10

    float64 = 11

    bool = 12

class ReduceOp(enum.Enum):
    sum = 0

    min = 1

    max = 2

    product = 3

class View:
    @property
    def address(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> int:
        """DLPack device type; 1 is host memory."""

    @property
    def shape(self) -> list[int]: ...
    @property
    def strides(self) -> list[int]:
        """In elements."""

def view(arg: Annotated[NDArray, dict(writable=False)], /) -> View: ...
def combine(dtype: DType, op: ReduceOp, target: int, sources: Sequence[int], count: int, divisor: int) -> None:
    """dst = sources combined left to right; addresses of host memory."""

class Wire(enum.Enum):
    NONE = 0

    FP16 = 1

    BF16 = 2

    INT8 = 3

def encoded_bytes(wire: Wire, elements: int) -> int: ...
def encode(wire: Wire, target: int, source: int, count: int) -> None:
    """What `count` float32 are on the wire; for tests."""

def round_trip(wire: Wire, target: int, source: int, count: int) -> None:
    """
    What `count` float32 are behind the wire; addresses of host memory, which may be the same.
    """

def combine_isa() -> str: ...
def force_isa(name: str) -> None: ...
def hmac_sha256(arg0: bytes, arg1: bytes, /) -> bytes: ...
def read_rows(
    descriptors: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    begins: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
    rows: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
    tail_bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
    tails: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
) -> int:
    """
    Fill `rows`, all of a size, with files' bytes from `begins` on, and `tails` with what follows each. How many came whole.
    """

class Footprint:
    @staticmethod
    def of(tensors: object, type: type) -> Footprint | None:
        """
        Where a list or tuple of tensors lies; None unless all are of this type, alike, and row by row in host memory.
        """

    def is_of(self, tensors: object) -> bool:
        """Whether these are the same objects, and lie as they did."""

    @property
    def address(self) -> int:
        """Of the first of them."""

    @property
    def form(self) -> bytes:
        """
        Equal for tensors that lie to each other alike, wherever the first one is.
        """

class Lowering(enum.Enum):
    NONE = 0

    SLICE = 1

    STAGED_SLICE = 2

    EXCHANGE = 3

    NOTES = 4

NOTE_BYTES: int = 65536

MOST_LANES: int = 16

class Program:
    @property
    def scratch_bytes(self) -> int: ...

class MoveColumns:
    def __init__(
        self,
        *,
        kind: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        last: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        channel: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)],
        source_space: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        source_offset: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        target_space: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        target_offset: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        peer_start: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        peers: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        wire: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        keeps_coded: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        coded_offset: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """
        One rank's moves, of one segment, with offsets and sizes in bytes and peers as world ranks.
        """

class ProgramForm:
    def __init__(
        self,
        *,
        scratch_bytes: int,
        dtype: DType,
        op: ReduceOp,
        divisor: int,
        lowering: Lowering,
        segments: int,
        segment_bytes: int,
        last_segment: Program | None,
    ) -> None:
        """
        What its moves are done with, and on how many segments of so many bytes.
        """

def make_program(columns: MoveColumns, form: ProgramForm) -> Program: ...

class Rounds:
    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Rounds of agreement as (to, from) world ranks."""

class OperationSpec:
    def __init__(
        self,
        key: tuple[int, int],
        members: Sequence[int],
        rounds: Rounds,
        at_once: bool,
        digest: bytes,
        description: str,
        program: Program | None,
        input: int,
        output: int,
        user_bytes: int,
        name: int,
        slots: SharedSlots | None,
        meets: bool,
        tells_mismatch: bool,
    ) -> None: ...

class Operation:
    @property
    def title(self) -> str: ...
    @property
    def sequence(self) -> int: ...
    @property
    def ran_s(self) -> tuple[float, float]:
        """
        When all ranks had arrived, and when it ended: seconds of the monotonic clock, the former 0 if they never did.
        """

    @property
    def fault(self) -> FaultKind: ...
    @property
    def fault_text(self) -> str: ...
    @property
    def culprit(self) -> int:
        """Who was silent, after a stall; else -1."""

    @property
    def descriptions(self) -> dict[int, str]: ...
    @property
    def log(self) -> list[tuple[Lowering, int, int, int]]: ...

class SharedSlots:
    def __init__(self, context: Context, members: Sequence[int], steps: int) -> None:
        """The slots in which ranks of one host meet."""

    CAPACITY: Final[int] = ...
    """Bytes of payload."""

class Holdings:
    def __init__(self, context: object) -> None: ...
    def post(self, spec: OperationSpec, caller_waits: bool, memory: object | None) -> Operation:
        """Start an operation, and keep what it works on until it has ended."""

    def release(self, operation: Operation) -> None:
        """Let go of what an operation that has ended worked on."""

class Repeats:
    def __init__(
        self,
        holdings: object,
        group: int,
        slots: SharedSlots | None,
        steps: int,
        patience_s: float,
        pause_every: int,
        array_type: object,
    ) -> None: ...
    def next(self) -> int:
        """The group's next sequence number."""

    @property
    def last(self) -> int:
        """The sequence number given last; 0: none was."""

    @property
    def slots(self) -> SharedSlots: ...
    def remember(self, spec: OperationSpec, array: object | None, op: object | None) -> None:
        """From now on `all_reduce`, or `barrier`, knows calls like this one."""

    def all_reduce(self, name: int, array: object | None, op: object | None) -> object:
        """
        True: done. An Operation: it goes on, or has failed. None: nothing was begun, the call is not known.
        """

    def barrier(self, name: int) -> object:
        """As all_reduce."""

    def post_again(self, model: OperationSpec, memory: object | None) -> Operation:
        """
        Start what was started before, as the group's next operation; this thread waits for it next.
        """

    def forget(self) -> None:
        """Know no calls any more."""

class ControlMessageKind(enum.Enum):
    MESSAGE = 0

    MISMATCH = 1

    LOSS = 2

class ControlMessage:
    @property
    def kind(self) -> ControlMessageKind: ...
    @property
    def rank(self) -> int:
        """In the world: who sent a message; who is gone."""

    @property
    def group(self) -> int:
        """What a message is for; the group of a mismatch."""

    @property
    def tag(self) -> int:
        """Of a message; a mismatch's sequence number."""

    @property
    def payload(self) -> bytes:
        """What a message says; why a rank is gone."""

    @property
    def died(self) -> bool:
        """Of a loss: whether the rank died, rather than left."""

    @property
    def titles(self) -> dict[int, str]:
        """What each rank of the world called the operation of a mismatch."""

class ContextConfig:
    def __init__(
        self,
        *,
        rank: int,
        size: int,
        job: bytes,
        secret: bytes,
        segment_bytes: int,
        stall_warn_s: float,
        stall_timeout_s: float,
        log_moves: bool,
        lower: bool,
        read_peers: bool,
        by_mpi: bool,
        rail_timeout_s: float,
        wire_timeout_s: float,
    ) -> None: ...

class Context:
    def __init__(self, config: ContextConfig) -> None: ...
    @property
    def handover_name(self) -> str: ...
    def listen(self, host: str, first_port: int, last_port: int) -> int:
        """
        Listen at a numeric address on the first free port; returns the port. Each call makes one more rail.
        """

    def connect(
        self,
        peers: Sequence[tuple[int, bool, str, Sequence[tuple[str, int]], str]],
        local_ranks: Sequence[int],
        neighbours: Sequence[int],
        timeout_s: float,
        disturbed: Callable,
    ) -> bool:
        """
        False when `disturbed` returned True first. peers: (rank, same host, hand-over name, (host, port) of each rail, its host in words).
        """

    def allocate(self, bytes: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """Arena memory as bytes; freed with the last array that views it."""

    def arena_bytes(self) -> int: ...
    def holds(self, address: int, bytes: int) -> bool:
        """Whether the memory lies in this rank's arena."""

    def post(self, spec: OperationSpec, caller_waits: bool) -> Operation: ...
    def wait(self, operation: Operation, timeout_s: float) -> bool: ...
    def has_ended(self, operation: Operation) -> bool: ...
    def stalled_on(self, operation: Operation) -> tuple[list[int], float]:
        """Ranks waited for, and the seconds since anything moved."""

    def give_up(self, operation: Operation, silent: int) -> None:
        """
        Fail an operation in flight on all its ranks, as if rank `silent` had been silent for too long.
        """

    def abort(self, operation: Operation, culprit: int) -> None:
        """
        Fail an operation in flight on all its ranks, as rank `culprit` has aborted the group.
        """

    def goodputs(self) -> list[tuple[int, int]]:
        """
        (rank, bytes per second it took lately) of the ranks of other hosts that this one is connected to, where known.
        """

    def read_by(self) -> list[int]:
        """Ranks of this host that read this rank's ordinary memory in place."""

    def has_failed(self) -> bool:
        """Whether a rank died or fell silent, or this one cannot go on."""

    def losses(self) -> dict[int, tuple[bool, str]]:
        """Ranks that are gone: (died rather than left, why)."""

    def take_events(self) -> list[tuple[int, int, int, int, int, int, int, int]]:
        """
        (kind, name, group, sequence, bytes, start ns, agreed ns, end ns) since the last call. Kinds: operation, wait, rail (name: which was given up; sequence: the peer).
        """

    def rails(self) -> list[tuple[int, int, bool, int, float]]:
        """
        (peer, rail, is up, bytes acknowledged, busy seconds) of every connection to another host.
        """

    def take_rail_losses(self) -> list[tuple[int, int, str]]:
        """(peer, rail, why) of the rails given up since the last call."""

    def dropped_events(self) -> int: ...
    def keep_timeline(self, keeps: bool) -> None:
        """Whether events are kept for take_timeline too, in addition."""

    def take_timeline(self) -> bytes:
        """Rows of trace.part.ROW, since the last call."""

    def dropped_from_timeline(self) -> int: ...
    def settled(self, timeout_s: float) -> bool:
        """True once nothing is in flight and every frame has been handed on."""

    def collect(self, pause_ns: int) -> tuple[list[tuple[int, int, int, bool, int, int]], list[int], bool, bool]:
        """
        What MPI is to carry, new since the last call: (bounce buffers, peers given up, whether anything is on its way, closed). A bounce buffer is (number, peer, tag, is outgoing, address, bytes). Waits up to `pause_ns` where something is on its way, else until something is.
        """

    def carried(self, numbers: Sequence[int]) -> None:
        """These were sent, or have arrived."""

    def cannot_reach(self, peer: int, why: str) -> None:
        """MPI fails for this peer; it counts as lost."""

    def allow_spin(self, seconds: float) -> None: ...
    def close(self, grace_s: float, announce: bool) -> None: ...
    def link_with(self, ranks: Sequence[int]) -> None:
        """
        Open the connections with these ranks that are not there yet; the others do the same.
        """

    def notify(self, rank: int, group: int, tag: int, payload: bytes) -> bool:
        """
        Send a short message to a rank of the world, outside any operation. False: it is gone, or cannot be reached.
        """

    def take_control_messages(self, timeout_s: float) -> list[ControlMessage] | None:
        """
        What has come since the last call, at once where there is something; None once the context is closed.
        """

    def wake_control(self) -> None:
        """Have take_control_messages return."""

def end_without_mpi() -> None:
    """
    This process is to end even if MPI_Finalize, called as the last thing in it, waits for ranks that are gone.
    """

class Request:
    @property
    def number(self) -> int: ...
    @property
    def process_set(self) -> int: ...
    @property
    def collective(self) -> int: ...
    @property
    def type(self) -> int: ...
    @property
    def op(self) -> int: ...
    @property
    def root(self) -> int: ...
    @property
    def prescale(self) -> float: ...
    @property
    def postscale(self) -> float: ...
    @property
    def wants_rows(self) -> bool: ...
    @property
    def name(self) -> bytes: ...
    @property
    def wire(self) -> bytes: ...
    @property
    def size_bytes(self) -> int:
        """Of all its arrays."""

    @property
    def is_cancelled(self) -> bool: ...
    @property
    def signature(self) -> bytes:
        """The same for requests that differ in nothing but their arrays' memory."""

    @property
    def shapes(self) -> list[list[int]]: ...
    @property
    def splits(self) -> object: ...
    def input(self, array: int) -> int:
        """An array's address."""

    def output(self, array: int, shape: Sequence[int]) -> int:
        """The address for an array's result, of this shape."""

    def allocate(self, array: int, shape: Sequence[int]) -> int:
        """The address of memory that the caller gives for another result."""

    def pack(self, memory: int) -> None:
        """Copy all arrays to memory, one behind the other."""

    def unpack(self, memory: int) -> None:
        """Copy all results from memory; they have their arrays' shapes."""

class RequestQueue:
    def __init__(self) -> None: ...
    @property
    def address(self) -> int:
        """Of its MultiringEntry."""

    @property
    def capsule(self) -> CapsuleType:
        """What native code is given; see multiring.h."""

    @property
    def in_flight(self) -> int:
        """How many requests have not ended."""

    def take(self) -> Request:
        """
        The next request, once there is one, and the turn to submit it. One that was cancelled later comes once more.
        """

    def pass_turn(self) -> bool:
        """Pass the turn on; False: no thread waits for it."""

    def end(self, request: Request, error: int, text: str) -> None:
        """
        Tell a request's caller that it has ended; nothing where it was told before.
        """

    def cancel_all(self) -> int:
        """Have all requests in flight fail; how many there were."""

    def close(self) -> None:
        """Have whatever comes from now on fail at once."""
