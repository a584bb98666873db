"""Each ordering of streams in the sources is left out by a mutant of a test, or it says here why none can show it."""

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tests.support.orderings import SOURCES, Place, sites, without

TESTS = Path(__file__).parents[1]
PINNED = "_runtime/engines/pinned_memory.py"
ELEMENTS = "torch/gradients/change_detection.py _CopiedElements"
COPIES, GRADIENTS = "cuda/test_device_staging.py", "cuda/test_gradient_orderings.py"
BACKEND, CALLS = "cuda/test_backend_orderings.py", "cuda/test_orderings_by_call.py"
AHEAD = "cuda/test_ahead_of_agreements.py"
HOSTS = "cuda/test_hierarchical_orderings.py"
STAGED = "wire/test_staged_engine.py"
BUCKETS, NCCL, ENGINE = "cuda/test_nccl_buckets.py", "cuda/test_nccl_collectives.py", "wire/test_nccl_orderings.py"

# The mutants that leave out each site, or that take away what it orders: the test's file and the mutant's name.
MUTANTS: dict[str, tuple[str, str]] = {
    "torch/c10d/staged.py StagedWork.wait: current_stream.wait_event": (BACKEND, "kernels before the outputs"),
    "torch/c10d/staged.py StagedTensors._prepared: ready.record": (BACKEND, "outputs before earlier kernels"),
    "torch/c10d/staged.py _issue: event.synchronize": (BACKEND, "host before the copies"),
    "torch/c10d/staged.py _brought_back: stream.wait_event": (BACKEND, "outputs before the copies back"),
    "torch/c10d/staged.py _brought_back: record_use(tensor)": (
        BACKEND,
        "output with gaps freed under its copy",
    ),
    "torch/c10d/staged.py _brought_back: record_use(dense)": (
        BACKEND,
        "copy without gaps freed too early",
    ),
    "torch/c10d/staged.py _brought_back: event.record": (BACKEND, "end before the outputs"),
    "_frontend/submission_line.py await_all: event.synchronize": (COPIES, "host before the copy"),
    "_frontend/submission_line.py Submission.await_events: event.synchronize": (CALLS, "statistics before their copy"),
    "_frontend/submission_line.py Submission.submit: event.synchronize": (CALLS, "statistics before their copy"),
    f"{PINNED} PinnedBlock.is_quiet: self._copies[0].query": (
        COPIES,
        "block used again under a copy",
    ),
    f"{PINNED} PinnedMemory._quiet: free[place].is_quiet": (
        COPIES,
        "block used again under a copy",
    ),
    "torch/device_staging.py DeviceStaging.all_to_host_behind: self._to_host.wait_event": (
        COPIES,
        "to the host before the kernels",
    ),
    "torch/device_staging.py DeviceStaging.all_to_host_behind: record_use(source)": (
        COPIES,
        "source freed under the copy",
    ),
    "torch/device_staging.py DeviceStaging.all_to_host_behind: block.note": (
        CALLS,
        "block used again under a copy to it",
    ),
    "torch/device_staging.py DeviceStaging.all_to_device: stream.wait_event": (
        COPIES,
        "to the device before its event",
    ),
    "torch/device_staging.py DeviceStaging.all_to_device: record_use(target)": (
        COPIES,
        "target freed under the copy",
    ),
    "torch/device_staging.py DeviceStaging.all_to_device: block.note": (
        CALLS,
        "block used again under a copy from it",
    ),
    "torch/device_staging.py DeviceStaging.reached: mark.record": (CALLS, "streams that nothing is behind"),
    "torch/device_staging.py DeviceStaging._recorded: event.record": (CALLS, "events that nothing is behind"),
    "torch/gradients/device_buckets.py _wait_for: event.synchronize": (GRADIENTS, "host before the copy"),
    "torch/gradients/device_buckets.py DeviceBucket.__init__: self._made.record": (
        GRADIENTS,
        "gradients before the zeros",
    ),
    "torch/gradients/device_buckets.py DeviceBucket.come_behind: stream.wait_event": (
        GRADIENTS,
        "gradients before the zeros",
    ),
    "torch/gradients/device_buckets.py OnDevice.come_after: current_stream.wait_event": (
        GRADIENTS,
        "kernels before the copy back",
    ),
    "torch/gradients/device_buckets.py DeviceBucket._await_writers: current.wait_stream": (
        GRADIENTS,
        "copy before the other streams",
    ),
    "torch/gradients/device_buckets.py on_host: last[tensor.device].record": (GRADIENTS, "norms before the copy"),
    "torch/gradients/device_buckets.py on_host: event.synchronize": (GRADIENTS, "norms before the copy"),
    "torch/collectives/by_nccl.py _Copies.await_copies: pop.synchronize": (NCCL, "host before the copies"),
    "torch/collectives/by_nccl.py _Reduction._brought_to_host: to_host.synchronize": (
        NCCL,
        "host before the copy of a buffer",
    ),
    "torch/collectives/by_nccl.py _Reduction._behind_copy: stream.wait_event": (NCCL, "NCCL before the copy"),
    "torch/collectives/by_nccl.py _Reduction._copy_on_device: self._written.record": (NCCL, "NCCL before the copy"),
    "torch/collectives/by_nccl.py _Reduction._order: begun.order": (NCCL, "kernels before NCCL"),
    "torch/collectives/by_nccl.py _Reduction._order: self._buffer.record_stream": (NCCL, "memory used again"),
    "torch/collectives/by_nccl.py _Reduction._restore: stream.synchronize": (AHEAD, "freed under the second copy"),
    "torch/gradients/nccl_buckets.py OnNccl.come_after: reduced.order": (BUCKETS, "kernels before NCCL"),
    "torch/hierarchical_path.py HierarchicalHandle.order: gathered.order": (HOSTS, "kernels before NCCL gathers"),
    "torch/hierarchical_path.py _ToHosts._copy: trip.scattered.order": (HOSTS, "copy to the host before NCCL reduces"),
    "torch/hierarchical_path.py _ToHosts._copy: to_host.synchronize": (HOSTS, "network before the copy to the host"),
    "torch/gradients/parameters.py _broadcast_from_devices: event.synchronize": (CALLS, "broadcast before the copy"),
    "_runtime/engines/nccl_device.py NcclDevice._issue: self.driver.wait_on": (
        ENGINE,
        "wait for the engine's own inputs",
    ),
    "_runtime/engines/nccl_device.py NcclDevice._issue: self.driver.record": (ENGINE, "wait for the end"),
    "_runtime/engines/nccl_device.py NcclDevice._has_done: self.driver.has_happened": (ENGINE, "wait for the end"),
    "_runtime/engines/nccl_device.py have_wait: driver.wait_on": (ENGINE, "order a caller's stream"),
    "_runtime/engines/cuda_arrays.py DeviceBlocks.after: self._driver.record": (
        ENGINE,
        "wait for callers' streams before blocks are used again",
    ),
    "_runtime/engines/cuda_arrays.py DeviceBlocks.have_wait: self._driver.wait_on": (
        ENGINE,
        "have an importing library wait for contents",
    ),
    "_runtime/engines/cuda_arrays.py CudaArray.put: driver.wait_on": (ENGINE, "wait before a copy from the host"),
    "_runtime/engines/cuda_arrays.py CudaArray.put: driver.record": (ENGINE, "wait for the engine's own inputs"),
    "_runtime/engines/cuda_arrays.py CudaArray.get: driver.wait_on": (ENGINE, "wait before a copy to the host"),
    "_runtime/engines/cuda_arrays.py foreign_buffer: driver.record": (ENGINE, "wait for other libraries' streams"),
    "_runtime/engines/nccl_device.py NcclDevice._has_left: self.driver.record": (ENGINE, "keep memory after a failure"),
    "_runtime/engines/nccl_device.py NcclDevice._has_left: self.driver.has_happened": (
        ENGINE,
        "keep memory after a failure",
    ),
    f"{ELEMENTS}.__init__: recorded.record_stream": (
        CALLS,
        "recorded elements used again",
    ),
    f"{ELEMENTS}.__init__: current.record_stream": (
        CALLS,
        "gradient used again",
    ),
    f"{ELEMENTS}.__init__: self._event.record": (
        CALLS,
        "copies that no event is behind",
    ),
    f"{ELEMENTS}.changed: self._event.synchronize": (
        CALLS,
        "elements compared before their copies",
    ),
    "_runtime/engines/staged.py _Staging.let_go: copied.query": (STAGED, "memory let go under the copy back"),
    "_runtime/engines/staged.py _Staging._bring: self._driver.wait_on": (STAGED, "copy to the host before the inputs"),
    "_runtime/engines/staged.py _Staging._bring: _Copied.synchronize": (STAGED, "host before the copy"),
    "_runtime/engines/staged.py _Staging._copy: self._driver.record": (STAGED, "copies that have happened at once"),
    "_runtime/engines/staged.py _Staging._copy: block.note": (STAGED, "block used again under a copy"),
    "_runtime/engines/staged.py _Copied.query: self._driver.has_happened": (
        STAGED,
        "copies that have happened at once",
    ),
    "_runtime/engines/staged.py _Copied.synchronize: self.query": (STAGED, "copies that have happened at once"),
    "_runtime/engines/staged.py StagedOperation.await_device: _Copied.synchronize": (
        STAGED,
        "end before the copy back",
    ),
    # What the calls above are made of.
    "torch/device_staging.py record_use: tensor.record_stream": (COPIES, "source freed under the copy"),
    "_runtime/engines/cuda_driver.py CudaDriver.record: cuEventRecord": (ENGINE, "wait for the end"),
    "_runtime/engines/cuda_driver.py CudaDriver.wait_on: cuStreamWaitEvent": (
        ENGINE,
        "wait for the engine's own inputs",
    ),
    "_runtime/engines/cuda_driver.py CudaDriver.has_happened: cuEventQuery": (ENGINE, "wait for the end"),
}
# No mutant of these can give wrong values.
EXEMPT: dict[str, str] = {
    "_runtime/engines/staged.py StagedOperation.done: self._driver.has_happened": "an answer; `wait` waits",
    "_frontend/submission_line.py await_all: event.query": "it decides how to wait, and the next line waits",
    "_frontend/submission_line.py Submission.is_ready: event.query": "it decides who submits, and `submit` waits",
    "torch/device_staging.py DeviceStaging.to_host: _block_of.note": (
        "this thread waits for the copy next; the note counts only if an error ends the wait"
    ),
    "torch/device_staging.py DeviceStaging._copied: stream.synchronize": (
        "after an error only; cuda/test_copies_with_errors.py fails without it"
    ),
    f"{PINNED} _end_copies: popleft.synchronize": "cudaHostUnregister waits for the device, too",
    "_runtime/engines/cuda_arrays.py CudaArray.get: cuStreamSynchronize": (
        "CUDA copies to memory that is not pinned before the call returns"
    ),
    "torch/hierarchical_path.py HierarchicalHandle._quiet_after_failure: self._trip.returned.synchronize": (
        "after a failure only; values are undefined then, and the next reduction would have to overtake an error"
    ),
    "torch/c10d/staged.py StagedWork.is_completed: self._event.query": "an answer, as cuEventQuery's; `wait` orders",
    "torch/gradients/change_detection.py _CopiedElements.changed: self._event.query": "the next line waits",
    "torch/gradients/distributed.py Distributed.synchronize: self._reducer.synchronize": "the optimizer's method",
    "torch/gradients/bucket_tensors.py InTensors.state: found.query": "a factor of PowerSGD",
    "torch/c10d/stores.py _refuse_other_place: urlparse.query": "a part of a URL",
    "torch/gradients/bucket_tensors.py InTensors.load_state: state.query": "a factor of PowerSGD",
}


@cache
def mutants_of(file: str) -> set[str]:
    """Return the names of the mutants that a test file lists."""
    found: set[str] = set()
    for node in ast.parse((TESTS / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in {"MUTANTS", "DISORDERS"}:
            assert isinstance(node.value, ast.Dict)
            found |= {str(ast.literal_eval(key)) for key in node.value.keys if key is not None}
    assert found, file
    return found


def test_each_ordering_in_the_sources_has_a_mutant() -> None:
    listed = {*MUTANTS, *EXEMPT}
    assert sorted(set(sites()) - listed) == [], "list a mutant that leaves each of these out"
    assert sorted(listed - set(sites())) == [], "the sources do not have these any more"
    assert not set(MUTANTS) & set(EXEMPT)


@pytest.mark.parametrize("site", MUTANTS)
def test_the_mutant_is_there(site: str) -> None:
    file, name = MUTANTS[site]
    assert name in mutants_of(file)


def test_there_are_many() -> None:
    files = COPIES, GRADIENTS, BACKEND, CALLS, AHEAD, BUCKETS, NCCL, HOSTS, STAGED, ENGINE
    assert sum(len(mutants_of(file)) for file in files) >= 25


def test_an_ordering_is_found_wherever_it_is() -> None:
    found = sites()
    file = SOURCES / "torch" / "c10d" / "staged.py"
    (place,) = found["torch/c10d/staged.py StagedWork.wait: current_stream.wait_event"]
    assert place.file == file
    assert "wait_event" in file.read_text(encoding="utf-8").splitlines()[place.first_line - 1]


def test_a_call_is_left_out_at_its_site_only(monkeypatch: pytest.MonkeyPatch) -> None:
    line = the_site.__code__.co_firstlineno + 1
    monkeypatch.setitem(sites(), "here", [Place(Path(__file__), "the_site", line, line)])
    changed = without(lambda: "called", "here", instead="left out")
    assert the_site(changed) == ["left out", "called"]
    assert changed() == "called"


def the_site(call: Callable[[], str]) -> list[str]:
    first = call()
    return [first, call()]
