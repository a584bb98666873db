"""The stand-ins of CUDA and NCCL behave like the H100 of the record, and report what NCCL leaves undefined."""

import ctypes
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.standin.build import built, declarations
from tests.standin.loading import load, nccl, reports, runtime
from tests.standin.runtime_signatures import IpcHandle
from tests.support.ranks import Here, report_of, run_ranks

from multiring._runtime.arrays import numpy_dtype
from multiring._runtime.engines.nccl_library import NcclConfig, UniqueId
from multiring._verify.behaviours import calls, nccl_calls
from multiring._verify.behaviours.table import BEHAVIOURS, MODULES, recorded
from multiring.errors import PeerLostError

OCCUPIED_US = 100_000
FLOAT32, SUM = 7, 0
# The recorded experiments that the stand-ins repeat. Each list runs in one process.
ALIKE = [
    [
        "codes_while_a_stream_works",
        "blocking_stream_waits_for_the_legacy_stream",
        "a_wait_means_the_record_before_it",
        "an_event_may_be_destroyed_while_waited_for",
        "elapsed_time",
        "host_function_runs_in_stream_order",
        "wait_value_on_pinned_memory",
        "wait_value_on_registered_shared_memory",
        "a_stream_that_waits_for_a_value_for_ever_can_be_freed_by_the_host",
        "wait_value_in_a_capture",
        "calls_during_a_capture",
        "calls_beside_a_capture_of_another_mode",
        "stream_priorities",
        "threads_and_devices",
    ],
    [
        "register_parts_and_twice",
        "register_two_mappings_of_the_same_memory",
        "register_a_read_only_mapping",
        "pointer_attributes",
        "copies_of_wrong_pointers",
        "out_of_memory",
        "free_waits_for_the_device",
        "ipc_handle_of_an_event",
        "fork_after_the_context",
    ],
    ["sticky_error"],
    [
        "nccl_error_strings",
        "nccl_in_place_and_out_of_place",
        "nccl_bad_arguments",
        "nccl_an_error_inside_a_group",
        "nccl_send_to_itself",
        "nccl_is_asynchronous",
        "nccl_premultiplied_sum",
        "nccl_split_and_destroy",
        "nccl_abort_while_a_rank_is_missing",
        "nccl_two_ranks_on_one_gpu_in_one_process",
    ],
    ["nccl_after_a_sticky_error"],
]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    built()


class Tensor:
    """What the experiments use of a tensor on the device."""

    def __init__(self, values: Any) -> None:
        self._values = np.array(values, np.float32)
        self._address = calls.device_memory(self._values.nbytes)
        self._copy(self._address, self._values.ctypes.data)

    def data_ptr(self) -> int:
        return self._address.value or 0

    def tolist(self) -> list[float]:
        self._copy(self._values.ctypes.data, self._address)
        return [float(each) for each in self._values]

    def __getitem__(self, index: Any) -> None:
        """Read beyond the end, which is a failed assertion on the device."""
        runtime().standin_fail_on_stream(None, 710)

    def _copy(self, to: Any, source: Any) -> None:
        runtime().cudaMemcpy(to, source, self._values.nbytes, 4)


class Torch:
    """What the experiments use of PyTorch."""

    class cuda:  # noqa: D106, N801 -- PyTorch's spelling
        @staticmethod
        def synchronize() -> None:
            runtime().cudaDeviceSynchronize()

    float32 = "float32"

    @staticmethod
    def tensor(values: Any, **_: Any) -> Tensor:
        return Tensor(values)

    @staticmethod
    def zeros(count: int, **_: Any) -> Tensor:
        return Tensor([0] * count)

    ones = zeros


def experiment(here: Here, names: list[str]) -> dict[str, Any]:
    assert here.size == 1
    load()
    c = runtime()
    for module in (calls, nccl_calls, *MODULES):
        vars(module).update(runtime=lambda: c, pytorch=Torch, occupy=lambda on: c.standin_occupy(on, OCCUPIED_US))
    return json.loads(json.dumps({name: BEHAVIOURS[name]() for name in names}))  # type: ignore[no-any-return]


@pytest.mark.parametrize("names", ALIKE, ids=lambda names: names[0])
def test_the_stand_ins_behave_like_the_device_of_the_record(names: list[str]) -> None:
    record = recorded()
    (found,) = run_ranks(experiment, 1, names)
    assert found == {name: record[name] for name in names}


def test_the_stand_ins_have_the_parameters_that_multiring_passes(tmp_path: Path) -> None:
    assert "int ncclSend(void*, unsigned long, int, int, void*, void*);" in declarations().splitlines()
    wrong = f'{declarations()}extern "C" int cuInit(unsigned, int) {{ return 0; }}\n'
    (tmp_path / "wrong.cc").write_text(wrong, encoding="utf-8")
    found = subprocess.run(
        [shutil.which("c++") or "c++", "-std=c++20", "-fsyntax-only", str(tmp_path / "wrong.cc")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode != 0
    assert "cuInit" in found.stderr


class Rank:
    """One rank's device, with a stream, communicators and arrays."""

    def __init__(self, here: Here, *, devices: int = 4, device: int | None = None, **settings: object) -> None:
        self.group = here.join()
        load(devices=devices, **settings)
        self.c, self.n = runtime(), nccl()
        self.c.cudaSetDevice(here.rank if device is None else device)
        self.rank, self.size = here.rank, here.size
        self.stream = behaviours_stream(self.c)

    def join(self, ranks: int | None = None, *, blocking: bool = True) -> tuple[ctypes.c_void_p, int]:
        """Return a new communicator of all ranks, and NCCL's code."""
        name, made = UniqueId(), ctypes.c_void_p()
        if self.rank == 0:
            self.n.ncclGetUniqueId(ctypes.byref(name))
        told = np.frombuffer(bytes(name), np.uint8).copy()
        self.group.broadcast(told)
        config = NcclConfig.non_blocking()
        config.blocking = int(blocking)
        name = UniqueId.from_buffer_copy(told.tobytes())
        return made, self.n.ncclCommInitRankConfig(
            ctypes.byref(made), ranks or self.size, name, self.rank, ctypes.byref(config)
        )

    def put(self, values: Any) -> ctypes.c_void_p:
        """Return the address of a copy on the device."""
        values, made = np.ascontiguousarray(values), ctypes.c_void_p()
        assert self.c.cudaMalloc(ctypes.byref(made), max(values.nbytes, 1)) == 0
        assert self.c.cudaMemcpyAsync(made, values.ctypes.data, values.nbytes, 1, self.stream) == 0
        return made

    def get(self, address: ctypes.c_void_p, like: Any) -> Any:
        """Return a copy of device memory, after all work of the stream."""
        found = np.empty_like(like)
        assert self.c.cudaMemcpyAsync(found.ctypes.data, address, found.nbytes, 2, self.stream) == 0
        return found

    def state(self, communicator: ctypes.c_void_p) -> int:
        found = ctypes.c_int()
        assert self.n.ncclCommGetAsyncError(communicator, ctypes.byref(found)) == 0
        return found.value

    def settled(self, communicator: ctypes.c_void_p, unsettled: int = 7) -> int:
        """Return the state of the communicator once it is no longer `unsettled`."""
        end = time.monotonic() + 240
        while (found := self.state(communicator)) == unsettled and time.monotonic() < end:
            time.sleep(0.002)
        return found


def behaviours_stream(c: ctypes.CDLL) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    assert c.cudaStreamCreateWithFlags(ctypes.byref(made), 1) == 0
    return made


TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}


def collectives(here: Here) -> None:
    me = Rank(here)
    communicator, code = me.join()
    assert code == 0
    n, size, end = me.n, here.size, (communicator, me.stream)
    for dtype, number in TYPES.items():
        operands = [(np.arange(12) % 5 + rank).astype(numpy_dtype(dtype)) for rank in range(size)]
        wide = np.stack([each.astype(np.float64) for each in operands])
        own = operands[here.rank]
        for op, total in enumerate([wide.sum(0), wide.prod(0), wide.max(0), wide.min(0)]):
            expected = total.astype(own.dtype)
            array = me.put(own)
            assert n.ncclAllReduce(array, array, 12, number, op, *end) == 0
            assert (me.get(array, own) == expected).all(), (dtype, op)
            part = own[: 12 // size]
            out = me.put(np.zeros_like(part))
            assert n.ncclReduceScatter(me.put(own), out, len(part), number, op, *end) == 0
            assert (me.get(out, part) == expected[here.rank * len(part) :][: len(part)]).all(), (dtype, op)
        array, out = me.put(own), me.put(np.zeros(12 * size, own.dtype))
        assert n.ncclAllGather(array, out, 12, number, *end) == 0
        assert (me.get(out, np.concatenate(operands)) == np.concatenate(operands)).all()
        assert n.ncclReduce(array, out, 12, number, 2, size - 1, *end) == 0
        assert (me.get(out, own) == (wide.max(0) if here.rank == size - 1 else operands[0])).all()
        assert n.ncclBroadcast(array, array, 12, number, size - 1, *end) == 0
        assert (me.get(array, own) == operands[-1]).all()
    # Every rank sends to the next one more than a box holds, and nothing to itself.
    values = np.arange(100_000, dtype=np.float64) + here.rank
    array, out = me.put(values), me.put(np.zeros_like(values))
    assert n.ncclGroupStart() == 0
    assert n.ncclRecv(out, values.size, 8, (here.rank - 1) % size, *end) == 0
    assert n.ncclSend(array, values.size, 8, (here.rank + 1) % size, *end) == 0
    assert n.ncclSend(array, 0, 8, here.rank, *end) == 0
    assert n.ncclRecv(out, 0, 8, here.rank, *end) == 0
    assert n.ncclGroupEnd() == 0
    assert (me.get(out, values) == values - here.rank + (here.rank - 1) % size).all()
    # The halves of a communicator are communicators.
    half, factor, made = ctypes.c_void_p(), ctypes.c_float(0.5), ctypes.c_int()
    assert n.ncclCommSplit(communicator, here.rank % 2, -here.rank, ctypes.byref(half), None) == 0
    assert n.ncclRedOpCreatePreMulSum(ctypes.byref(made), ctypes.addressof(factor), FLOAT32, 1, half) == 0
    one = me.put(np.ones(1, np.float32))
    assert n.ncclAllReduce(one, one, 1, FLOAT32, made.value, half, me.stream) == 0
    assert me.get(one, np.ones(1, np.float32)) == len(range(here.rank % 2, size, 2)) / 2
    assert n.ncclCommDestroy(half) == 0
    assert reports() == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_collectives_of_the_stand_in(ranks: int) -> None:
    run_ranks(collectives, ranks)


def what_is_undefined(here: Here) -> None:
    me = Rank(here, delay_us=2000)
    n = me.n
    array = me.put(np.ones(4, np.float32))

    # The ranks call different things: each gets an error late, and the stream goes on after an abort.
    communicator, _ = me.join()
    assert n.ncclAllReduce(array, array, 4 - here.rank, FLOAT32, SUM, communicator, me.stream) == 0
    assert me.settled(communicator, unsettled=0) == 5
    assert me.c.cudaStreamQuery(me.stream) == 600
    assert n.ncclCommAbort(communicator) == 0
    assert me.c.cudaStreamSynchronize(me.stream) == 0
    assert reports()[-1] == (
        f"rank {here.rank} calls AllReduce({4 - here.rank} elements of type 7, op 0, root 0), rank {1 - here.rank} "
        f"calls AllReduce({3 + here.rank} elements of type 7, op 0, root 0)"
    )

    # Two communicators get their operations in different orders.
    pair = [me.join()[0], me.join()[0]]
    for each in pair if here.rank else reversed(pair):
        n.ncclAllReduce(array, array, 4, FLOAT32, SUM, each, behaviours_stream(me.c))
    assert me.settled(pair[here.rank - 1], unsettled=0) == 5  # the first one of this rank, in which it waits
    assert "wrong order between communicators: before operation 1 of one" in reports()[-1]
    for each in pair:
        n.ncclCommAbort(each)

    # Memory of the host is refused, where the real NCCL would fail on the device.
    communicator, _ = me.join()
    host = np.ones(4, np.float32).ctypes.data
    assert n.ncclAllReduce(host, host, 4, FLOAT32, SUM, communicator, me.stream) == 4
    assert "memory that is not on the communicator's device" in reports()[-1]

    # An error on request, at the second operation.
    assert n.standin_nccl_fail(communicator, 2, 1) == 0
    for _ in range(2):
        assert n.ncclAllReduce(array, array, 4, FLOAT32, SUM, communicator, me.stream) == 0
    assert me.settled(communicator, unsettled=0) == 2
    n.ncclCommAbort(communicator)

    # A communicator that does not block may put its operations on the stream late.
    communicator, code = me.join(blocking=False)
    assert code == 7
    codes = {me.settled(communicator)}
    for _ in range(20):
        codes.add(n.ncclAllReduce(array, array, 4, FLOAT32, SUM, communicator, me.stream))
        assert me.settled(communicator) == 0
    assert codes == {0, 7}
    assert me.c.cudaStreamSynchronize(me.stream) == 0


def test_the_stand_in_reports_what_nccl_leaves_undefined() -> None:
    run_ranks(what_is_undefined, 2)


def share_a_device(here: Here) -> int:
    me = Rank(here, device=0, host=os.getpid() % 1000 if here.engine == "tcp" else 0)
    return me.join()[1]


def test_two_ranks_on_one_device_are_refused() -> None:
    assert run_ranks(share_a_device, 2) == [5, 5]
    assert run_ranks(share_a_device, 2, engine="tcp") == [0, 0]  # two hosts


def lose_a_rank(here: Here, is_reported: bool) -> None:  # noqa: FBT001 -- a case
    me = Rank(here, nccl_reports_death=int(is_reported))
    communicator, _ = me.join()
    array = me.put(np.ones(4, np.float32))
    assert me.c.cudaStreamSynchronize(me.stream) == 0
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert me.n.ncclAllReduce(array, array, 4, FLOAT32, SUM, communicator, me.stream) == 0
    with pytest.raises(PeerLostError):
        me.group.barrier()
    if is_reported:
        assert me.settled(communicator, unsettled=0) == 6
    else:  # as over NVLink or shared memory: nothing comes until the communicator is aborted
        time.sleep(0.3)
        assert me.state(communicator) == 0
    assert me.c.cudaStreamQuery(me.stream) == 600
    assert me.n.ncclCommAbort(communicator) == 0
    assert me.c.cudaStreamSynchronize(me.stream) == 0


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_rank_dies_in_a_collective(is_reported: bool) -> None:  # noqa: FBT001 -- a case
    first, second = report_of(lose_a_rank, 2, is_reported).outcomes
    assert second.exit_code == -signal.SIGKILL
    assert (first.error, first.exit_code) == (None, 0), first.output


def share_memory(here: Here) -> int:
    me, handle, opened = Rank(here, devices=1, device=0), IpcHandle(), ctypes.c_void_p()
    values = np.arange(5, dtype=np.float32)
    own = me.put(values)
    if here.rank == 0:
        assert me.c.cudaIpcGetMemHandle(ctypes.byref(handle), own) == 0
        assert me.c.cudaIpcOpenMemHandle(ctypes.byref(opened), handle, 1) == 201  # of this process
    told = np.frombuffer(bytes(handle), np.uint8).copy()
    assert me.c.cudaStreamSynchronize(me.stream) == 0
    me.group.broadcast(told)
    if here.rank == 1:
        assert me.c.cudaIpcOpenMemHandle(ctypes.byref(opened), IpcHandle.from_buffer_copy(told.tobytes()), 1) == 0
        found = me.get(opened, values)
        assert me.c.cudaMemcpyAsync(opened, me.put(values + 1), values.nbytes, 3, me.stream) == 0
        assert me.c.cudaStreamSynchronize(me.stream) == 0
        assert (found == values).all()
        assert me.c.cudaIpcCloseMemHandle(opened) == 0
        assert me.c.cudaMemsetAsync(opened, 0, 4, me.stream) == 1  # it is closed
    me.group.barrier()
    found = me.get(own, values)
    assert me.c.cudaStreamSynchronize(me.stream) == 0
    return int((found - values).max())


def test_a_process_opens_device_memory_of_another() -> None:
    assert run_ranks(share_memory, 2) == [1, 0]


def touch(here: Here) -> list[Any]:
    me = Rank(here, delay_us=30_000)
    array = me.put(np.full(1000, 7, np.uint8))
    pinned = ctypes.c_void_p()
    assert me.c.cudaMallocHost(ctypes.byref(pinned), 1000) == 0
    ctypes.memset(pinned, 1, 1000)
    assert me.c.cudaMemcpyAsync(pinned, array, 1000, 2, me.stream) == 0
    early = ctypes.c_ubyte.from_address(pinned.value or 0).value
    assert me.c.cudaStreamSynchronize(me.stream) == 0
    late = ctypes.c_ubyte.from_address(pinned.value or 0).value
    if (child := os.fork()) == 0:
        faulthandler.disable()
        ctypes.c_ubyte.from_address(array.value or 0).value = 1
        os._exit(0)
    return [early, late, os.waitpid(child, 0)[1] & 127]


def test_device_memory_is_out_of_the_hosts_reach_and_streams_are_late() -> None:
    assert run_ranks(touch, 1) == [[1, 7, signal.SIGSEGV]]
