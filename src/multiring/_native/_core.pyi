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
        """The DLPack device type; 1 is host memory."""

    @property
    def shape(self) -> list[int]: ...
    @property
    def strides(self) -> list[int]:
        """The strides in elements."""

def view(arg: Annotated[NDArray, dict(writable=False)], /) -> View: ...
def combine(dtype: DType, op: ReduceOp, target: int, sources: Sequence[int], count: int, divisor: int) -> None:
    """
    Combine the sources from left to right into the target. All addresses are of host memory.
    """

class Wire(enum.Enum):
    NONE = 0

    FP16 = 1

    BF16 = 2

    INT8 = 3

def encoded_bytes(wire: Wire, elements: int) -> int: ...
def encode(wire: Wire, target: int, source: int, count: int) -> None:
    """Encode `count` float32 values for the wire; for tests."""

def round_trip(wire: Wire, target: int, source: int, count: int) -> None:
    """
    Encode and decode `count` float32 values. Both addresses are of host memory and may be equal.
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
    Read rows of equal size, which start at `begins` of their files, into `rows`, and the bytes after each row into `tails`. Return the number of complete rows.
    """

class Footprint:
    @staticmethod
    def of(tensors: object, type: type) -> Footprint | None:
        """
        Record the layout of a list or tuple of tensors. Return None unless all tensors are of this type, have one element type, and are row-major in host memory.
        """

    def is_of(self, tensors: object) -> bool:
        """Return whether these are the same objects with the same layout."""

    @property
    def address(self) -> int:
        """The address of the first tensor."""

    @property
    def form(self) -> bytes:
        """
        A key that is equal for tensors with equal types, shapes and offsets from the first tensor.
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
        The moves of one rank in one segment: offsets and sizes in bytes, peers as world ranks.
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
        The parameters of a program: scratch memory, reduction, lowering and segments.
        """

def make_program(columns: MoveColumns, form: ProgramForm) -> Program: ...

class Rounds:
    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Rounds of agreement as (to, from) pairs of world ranks."""

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
        The times when all ranks had arrived (0 if they never did) and when the operation ended, in seconds of the monotonic clock.
        """

    @property
    def fault(self) -> FaultKind: ...
    @property
    def fault_text(self) -> str: ...
    @property
    def culprit(self) -> int:
        """The rank that was silent in a stall; else -1."""

    @property
    def descriptions(self) -> dict[int, str]: ...
    @property
    def log(self) -> list[tuple[Lowering, int, int, int]]: ...

class SharedSlots:
    def __init__(self, context: Context, members: Sequence[int], steps: int) -> None:
        """The slots for small operations of a group on one host."""

    def recycle(self, context: Context) -> None:
        """
        Give this rank's slots to the next group. No rank may use this group any more.
        """

    CAPACITY: Final[int] = ...
    """The largest payload in bytes."""

class Holdings:
    def __init__(self, context: object) -> None: ...
    def post(self, spec: OperationSpec, caller_waits: bool, memory: object | None) -> Operation:
        """Start an operation, and keep its memory alive until it has ended."""

    def release(self, operation: Operation) -> None:
        """Release the memory of an operation that has ended."""

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
        """Return the group's next sequence number."""

    @property
    def last(self) -> int:
        """The last sequence number given out; 0 if there is none."""

    @property
    def slots(self) -> SharedSlots: ...
    def remember(self, spec: OperationSpec, array: object | None, op: object | None) -> None:
        """Cache this call, so that `all_reduce` or `barrier` can repeat it."""

    def all_reduce(self, name: int, array: object | None, op: object | None) -> object:
        """
        Repeat a cached call. Return True if it is done, the Operation if it is unfinished or has failed, and None if the call is not cached and nothing was started.
        """

    def barrier(self, name: int) -> object:
        """Repeat a cached barrier; see `all_reduce`."""

    def post_again(self, model: OperationSpec, memory: object | None) -> Operation:
        """
        Start an operation like `model` with the group's next sequence number. This thread must wait for it next.
        """

    def forget(self) -> None:
        """Clear the cache of calls."""

class ControlMessageKind(enum.Enum):
    MESSAGE = 0

    MISMATCH = 1

    LOSS = 2

class ControlMessage:
    @property
    def kind(self) -> ControlMessageKind: ...
    @property
    def rank(self) -> int:
        """The sender of a message, or the lost rank; a world rank."""

    @property
    def group(self) -> int:
        """The address of a message, or the group of a mismatch."""

    @property
    def tag(self) -> int:
        """The tag of a message, or the sequence number of a mismatch."""

    @property
    def payload(self) -> bytes:
        """The content of a message, or the reason of a loss."""

    @property
    def died(self) -> bool:
        """Whether the lost rank died rather than left."""

    @property
    def is_cut_off(self) -> bool:
        """
        Whether the lost rank's host cannot be reached, so that the rank may still run.
        """

    @property
    def titles(self) -> dict[int, str]:
        """The description of a mismatched operation on each world rank."""

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
        seal: bool = False,
    ) -> None: ...
    @property
    def own_losses_only(self) -> bool:
        """
        Whether the rank believes no other rank that a third one is lost, because the ranks vote on it.
        """

    @own_losses_only.setter
    def own_losses_only(self, arg: bool, /) -> None: ...

class Context:
    def __init__(self, config: ContextConfig) -> None: ...
    @property
    def handover_name(self) -> str: ...
    def listen(self, host: str, first_port: int, last_port: int) -> int:
        """
        Listen at a numeric address and return the port, the first free one of the range. Each call adds a rail.
        """

    def use_connections(self, count: int) -> None:
        """
        Divide each rail to another host into `count` connections, each with a thread. All ranks must do the same before `connect`.
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
        Connect to the peers; return False if `disturbed` returned True first. Each peer is (rank, is on the same host, handover name, (host, port) of each rail, text that names its host).
        """

    def allocate(self, bytes: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        Return arena memory as a uint8 array. The last array that views it frees it.
        """

    def arena_bytes(self) -> int: ...
    def holds(self, address: int, bytes: int) -> bool:
        """Return whether the memory lies in this rank's arena."""

    def post(self, spec: OperationSpec, caller_waits: bool) -> Operation: ...
    def wait(self, operation: Operation, timeout_s: float) -> bool: ...
    def has_ended(self, operation: Operation) -> bool: ...
    def stalled_on(self, operation: Operation) -> tuple[list[int], float]:
        """
        Return the ranks that the operation waits for, and the seconds since anything moved.
        """

    def give_up(self, operation: Operation, silent: int) -> None:
        """
        Fail an operation in flight on all its ranks, as if rank `silent` had been silent for too long.
        """

    def abort(self, operation: Operation, culprit: int) -> None:
        """
        Fail an operation in flight on all its ranks, because rank `culprit` has aborted the group.
        """

    def goodputs(self) -> list[tuple[int, int]]:
        """
        Return (rank, recent bytes per second) of the connected ranks of other hosts, if known.
        """

    def read_by(self) -> list[int]:
        """
        Return the ranks of this host that can read this rank's ordinary memory.
        """

    def has_failed(self) -> bool:
        """
        Return whether a rank died, a group stalled or was aborted, or this rank cannot communicate.
        """

    def losses(self) -> dict[int, tuple[bool, str]]:
        """Return the lost ranks, each with (died rather than left, reason)."""

    def take_events(self) -> list[tuple[int, int, int, int, int, int, int, int]]:
        """
        Return the events since the last call: (kind, name, group, sequence, bytes, start ns, agreed ns, end ns). The kinds are operation, wait and rail; for a lost rail, `name` is its index and `sequence` the peer.
        """

    def rails(self) -> list[tuple[int, int, bool, int, float]]:
        """
        Return (peer, rail, is up, acknowledged bytes, busy seconds) of every connection to another host.
        """

    def take_rail_losses(self) -> list[tuple[int, int, str]]:
        """Return (peer, rail, reason) of the rails lost since the last call."""

    def dropped_events(self) -> int: ...
    def keep_timeline(self, keeps: bool) -> None:
        """Start or stop recording events for `take_timeline`."""

    def take_timeline(self) -> bytes:
        """Return the events since the last call as rows of `trace.part.ROW`."""

    def dropped_from_timeline(self) -> int: ...
    def settled(self, timeout_s: float) -> bool:
        """
        Wait until no operation is in flight and every frame has been sent. Return False after `timeout_s`.
        """

    def collect(self, pause_ns: int) -> tuple[list[tuple[int, int, int, bool, int, int]], list[int], bool, bool]:
        """
        Return the work for the thread that calls MPI: (new bounce buffers, newly lost peers, whether messages are in transit, whether the context is closed). A bounce buffer is (number, peer, tag, is outgoing, address, bytes). Without new work, wait: up to `pause_ns` while messages are in transit, else until there is work.
        """

    def carried(self, numbers: Sequence[int]) -> None:
        """Report that MPI has sent or received these bounce buffers."""

    def cannot_reach(self, peer: int, why: str) -> None:
        """Report that MPI fails for this peer; the peer then counts as lost."""

    def allow_spin(self, seconds: float) -> None: ...
    def close(self, grace_s: float, announce: bool) -> None: ...
    def link_with(self, ranks: Sequence[int]) -> None:
        """
        Open the missing connections with these ranks. Those ranks must make the same call.
        """

    def notify(self, rank: int, group: int, tag: int, payload: bytes) -> bool:
        """
        Send a short message to a world rank, outside any operation. Return False if the rank is lost or cannot be reached.
        """

    def take_control_messages(self, timeout_s: float) -> list[ControlMessage] | None:
        """
        Return the messages since the last call; wait for one up to `timeout_s`. Return None once the context is closed.
        """

    def wake_control(self) -> None:
        """Make `take_control_messages` return."""

def end_without_mpi() -> None:
    """
    Make this process end even if MPI_Finalize, at the process's exit, waits for lost ranks.
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
        """The total size of all arrays in bytes."""

    @property
    def is_cancelled(self) -> bool: ...
    @property
    def signature(self) -> bytes:
        """
        A key that is equal for requests that differ only in their arrays' memory.
        """

    @property
    def shapes(self) -> list[list[int]]: ...
    @property
    def splits(self) -> object: ...
    def input(self, array: int) -> int:
        """Return the address of an array."""

    def output(self, array: int, shape: Sequence[int]) -> int:
        """Return the address of the memory for an array's result of this shape."""

    def allocate(self, array: int, shape: Sequence[int]) -> int:
        """
        Return the address of memory that the caller provides for another result.
        """

    def pack(self, memory: int) -> None:
        """Copy all arrays to `memory`, one after another."""

    def unpack(self, memory: int) -> None:
        """
        Copy all results from `memory` to the outputs. They have their arrays' shapes.
        """

class RequestQueue:
    def __init__(self) -> None: ...
    @property
    def address(self) -> int:
        """The address of the MultiringEntry."""

    @property
    def capsule(self) -> CapsuleType:
        """The capsule for native code; see multiring.h."""

    @property
    def in_flight(self) -> int:
        """The number of requests that have not ended."""

    def take(self) -> Request:
        """
        Wait for the next request, and return it together with the turn to submit it. A request that is cancelled after that is returned a second time.
        """

    def pass_turn(self) -> bool:
        """Pass the turn on; return False if no thread waits for it."""

    def end(self, request: Request, error: int, text: str) -> None:
        """
        Report the end of a request to its caller, unless it was reported before.
        """

    def cancel_all(self) -> int:
        """Fail all requests in flight; return their number."""

    def close(self) -> None:
        """Make later requests fail at once."""

def load_crypto(path: str) -> str:
    """
    Load libcrypto from a path, or the system's if the path is empty, and return its version. The process keeps the first library.
    """

class MessageSeal:
    def close(self, message: bytes) -> bytes:
        """Return the next message, encrypted, with its tag."""

    def open(self, sealed: bytes) -> object:
        """
        Return the message; None if it is not the one that the other end closed next.
        """

class KeyExchange:
    def __init__(self) -> None: ...
    @property
    def offer(self) -> bytes:
        """
        The bytes to send to the other end: the preferred cipher and the public key.
        """

    def seal(self, theirs: bytes, secret: bytes, transcript: bytes, calls: bool) -> MessageSeal:
        """
        Return the seal of the connection. `transcript` must include both offers; `calls` differs between the ends.
        """
