"""A second engine under a Group: it is asynchronous, has its own device memory, and fails on request."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.ranks import Here, run_ranks

from multiring import Group
from multiring._runtime.arrays import Buffer
from multiring._runtime.engines.contract import RunningOperation
from multiring._runtime.group.compile import Request, task_of
from multiring._schedule import Collective, Splits
from multiring.errors import ArgumentError, MismatchError, MultiringError, PeerLostError, UnsupportedError
from multiring.planner import Plan


class DeviceArray:
    """An array in device memory: it has no buffer protocol and no DLPack, so NumPy cannot read it."""

    def __init__(self, device: "Device", address: int, shape: tuple[int, ...], dtype: str) -> None:
        self.device, self.address, self.shape, self.dtype = device, address, shape, dtype

    def put(self, values: Any) -> "DeviceArray":
        """Copy `values` from the host."""
        self.device.write(self.address, np.broadcast_to(np.asarray(values, self.dtype), self.shape))
        return self

    def get(self) -> NDArray[Any]:
        """Return a copy on the host."""
        return self.device.read(self.address, self.shape, self.dtype)


class Device:
    """Device memory: blocks of bytes by address."""

    def __init__(self) -> None:
        self._blocks: dict[int, bytes] = {}
        self._next = 1 << 40

    def allocate(self, size_bytes: int) -> int:
        address, self._next = self._next, self._next + size_bytes + 64
        self._blocks[address] = bytes(size_bytes)
        return address

    def write(self, address: int, values: NDArray[Any]) -> None:
        self._blocks[address] = values.tobytes()

    def read(self, address: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        found: NDArray[Any] = np.frombuffer(self._blocks[address], dtype).reshape(shape).copy()
        return found


class Running:
    """An operation on the device's only stream."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        try:
            self._future.result(timeout)
        except FutureTimeoutError:
            raise TimeoutError from None

    def await_device(self) -> None:
        raise AssertionError("the engine starts nothing ahead")

    def order(self, stream: int) -> None:
        raise UnsupportedError(f"the engine test has no streams, but stream {stream} was to wait")


class DeviceEngine:
    """An engine that carries bytes over a twin group, one operation of the device's stream after the other."""

    name = "test"

    def __init__(self, group: Group) -> None:
        self._transport = group.twin_for("test engine")
        self._device = Device()
        self._stream = ThreadPoolExecutor(1)
        self.gate = threading.Event()  # no operation runs while the gate is closed
        self.gate.set()
        self.fails = False  # whether the next operation fails
        self.started: list[Collective] = []
        self.refused: list[tuple[int, Exception]] = []
        self._number = -1

    def on(self, host: Group) -> "DeviceEngine":
        raise AssertionError(f"no test makes {host} on this engine")

    def allocate(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return DeviceArray(self._device, self._device.allocate(size_bytes), shape, dtype)

    def buffer_of(self, array: Any, *, writes: bool) -> Buffer:
        del writes
        if not isinstance(array, DeviceArray):
            raise ArgumentError(f"{type(array).__name__} is no array of the engine {self.name}")
        strides = tuple(int(np.prod(array.shape[dim + 1 :])) for dim in range(len(array.shape)))
        return Buffer(array.address, array.shape, strides, array.dtype, array)

    def serve(self, group: int) -> None:
        pass

    def start_ahead(self, number: int, plan: Plan, request: Request, buffers: tuple[Buffer | None, Buffer]) -> None:
        """Return None: the engine starts after the agreement."""

    def confirm(self, operation: RunningOperation, error: Exception | None) -> None:
        raise AssertionError(f"no operation starts early, but {operation} was to be confirmed with {error}")

    def refusal(self, number: int) -> None:
        """Return None: the engine starts nothing ahead."""

    def refuse(self, number: int, error: Exception) -> bool:
        self.refused.append((number, error))
        return False

    def start(self, number: int, plan: Plan, request: Request, buffers: tuple[Buffer | None, Buffer]) -> Running:
        assert number > self._number
        self._number = number
        self.started.append(request.collective)
        return Running(self._stream.submit(self._run, plan, request, buffers))

    def _run(self, plan: Plan, request: Request, buffers: tuple[Buffer | None, Buffer]) -> None:
        self.gate.wait()
        told = np.array([self.fails], np.uint8)
        self.fails = False
        self._transport.all_reduce(told, "max")
        if told[0]:
            raise PeerLostError("the test engine has lost its link")
        self._transport.pin(task_of(request), plan)
        source, target = ((None if each is None else self._read(each)) for each in buffers)
        assert target is not None
        match request.collective:
            case Collective.ALL_REDUCE:
                self._transport.all_reduce(target, request.op)
            case Collective.BROADCAST:
                self._transport.broadcast(target, request.root)
            case Collective.REDUCE_SCATTER:
                self._transport.reduce_scatter(source, target, request.op)
            case Collective.ALL_GATHER:
                self._transport.all_gather(source, target)
            case Collective.ALL_TO_ALL:
                assert isinstance(request.counts, Splits)
                self._transport.all_to_all(source, target, list(request.counts.send))
        self._device.write(buffers[1].address, target)

    def _read(self, buffer: Buffer) -> NDArray[Any]:
        return self._device.read(buffer.address, (buffer.count,), buffer.dtype)


def device_array(group: Group, shape: int | tuple[int, ...], dtype: Any) -> DeviceArray:
    """Return an array in the memory of the group's engine."""
    found: Any = group.allocate(shape, dtype)
    assert isinstance(found, DeviceArray)
    return found


def compute(here: Here) -> list[str]:
    host = here.join()
    engine = DeviceEngine(host)
    group = host.on_engine(engine)
    size, rank = group.size, group.rank
    with pytest.raises((TypeError, ValueError)):
        memoryview(engine.allocate((1,), "float32"))  # type: ignore[arg-type]  # that is the point

    array = device_array(group, (3, 5), np.float32).put(rank + 1)
    for times in range(3):  # the device's engine, unlike the host's, caches no calls by array
        group.all_reduce(array)
        assert (array.get() == size * (size + 1) / 2 * size**times).all()
    group.broadcast(array.put(rank), root=size - 1)
    assert (array.get() == size - 1).all()
    part = group.reduce_scatter(device_array(group, 2 * size, np.int64).put(np.arange(2 * size)))
    assert part.get().tolist() == [2 * rank * size, (2 * rank + 1) * size]
    even = group.all_gather(device_array(group, (2, 3), np.float64).put(rank))
    assert even.get()[:, 0].tolist() == [float(r) for r in range(size) for _ in range(2)]
    uneven, rows = group.all_gather(device_array(group, (rank + 1, 2), np.int32).put(rank), with_rows=True)
    assert rows == [r + 1 for r in range(size)]
    assert uneven.get()[:, 1].tolist() == [r for r in range(size) for _ in range(r + 1)]
    sent = group.all_to_all(device_array(group, size, np.int16).put(10 * rank + np.arange(size)))
    assert sent.get().tolist() == [10 * r + rank for r in range(size)]

    # Operations start in the order of the calls, and posting does not wait for the device.
    engine.gate.clear()
    handles = [group.all_reduce_async(device_array(group, 4, np.float32).put(each)) for each in range(20)]
    last = group.broadcast_async(array)
    with pytest.raises(TimeoutError):
        last.wait(timeout=0.01)
    assert not handles[0].done()
    engine.gate.set()
    last.wait()
    for handle in handles:
        handle.wait()
        assert handle.done()
    group.barrier()
    assert engine.started[-21:] == [Collective.ALL_REDUCE] * 20 + [Collective.BROADCAST]

    # The plans of the group name its engine, and the host group still uses the host's engine.
    assert {plan.engine for plan in group.plans.values()} == {"test"}
    host.all_reduce(np.ones(1000))
    return sorted({plan.engine for plan in host.plans.values()})


@pytest.mark.parametrize(("engine", "named"), [("shm", ["shm"]), ("tcp", ["tcp"]), ("shm+tcp", ["shm+tcp"])])
def test_collectives_on_another_engine(engine: str, named: list[str]) -> None:
    assert run_ranks(compute, 4 if engine == "shm+tcp" else 3, engine=engine) == [named] * (4 if "+" in engine else 3)


def fail(here: Here) -> None:
    host = here.join()
    engine = DeviceEngine(host)
    group = host.on_engine(engine)
    array = device_array(group, (4, 2), np.float32).put(1)
    before = len(engine.started)

    # The ranks pass different arguments: no operation starts, and the arrays are intact.
    with pytest.raises(MismatchError, match="float32 of shape"):
        group.all_reduce(array if here.rank else device_array(group, (2, 4), np.float32).put(1))
    assert (array.get() == 1).all()

    # One rank passes an array of another engine.
    with pytest.raises(ArgumentError if here.rank == 0 else MismatchError, match="is no array of the engine test"):
        group.all_reduce(np.ones(3) if here.rank == 0 else array)
    with pytest.raises(UnsupportedError, match="copies between arrays of the engine test are not supported"):
        group.all_reduce(array, out=device_array(group, (4, 2), np.float32))
    assert len(engine.started) == before

    # The operation fails on one rank and raises on all.
    engine.fails = here.rank == 1
    handle = group.all_reduce_async(array)
    for _ in range(2):
        with pytest.raises(MultiringError, match="has lost its link"):
            handle.wait()
    group.all_reduce(array)
    assert (array.get() == here.size).all()


def test_failures_of_another_engine() -> None:
    run_ranks(fail, 3)


def lose_a_rank(here: Here) -> None:
    host = here.join()
    group = host.on_engine(DeviceEngine(host))
    array = device_array(group, 10, np.float32).put(1)
    group.all_reduce(array)
    if here.rank == 2:
        return
    with pytest.raises(PeerLostError, match="rank 2"):
        group.all_reduce(array)


def test_a_rank_is_lost_before_the_engine_starts() -> None:
    run_ranks(lose_a_rank, 3)


def reduce_to_a_root(here: Here) -> None:
    group = here.join()
    for root in range(here.size):
        array = np.full((3, 4), here.rank + 1.0)
        array.flags.writeable = here.rank == root  # only the root's array is written
        group.reduce(array, root)
        total = here.size * (here.size + 1) / 2
        assert (array == (total if here.rank == root else here.rank + 1)).all()
    group.reduce_async(number := np.array([here.rank]), op="max").wait()
    assert number.tolist() == [here.size - 1 if here.rank == 0 else here.rank]
    with pytest.raises(ArgumentError, match="root=9"):
        group.reduce(number, 9)
    with pytest.raises(MismatchError, match="to rank"):
        group.reduce(number, here.rank)


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_reduce_to_a_root(engine: str) -> None:
    run_ranks(reduce_to_a_root, 3, engine=engine)
