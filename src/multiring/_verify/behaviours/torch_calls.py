"""Experiments with PyTorch's CUDA layer, on which an adapter relies."""

import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from multiring._verify.behaviours.calls import LONG, PAGE, pytorch, register, shared

TORCH: dict[str, Callable[[], Any]] = {}


def torch_(behaviour: Callable[[], Any]) -> Callable[[], Any]:
    """Add a behaviour to the table of this module."""
    TORCH["torch_" + behaviour.__name__] = behaviour
    return behaviour


def _busy(stream: Any) -> None:
    torch = pytorch()

    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)  # noqa: SLF001 -- the only kernel of PyTorch that takes a chosen time


@torch_
def copies_and_the_host() -> dict[str, Any]:
    """Check which copies between host and device block the host, and which value each copy transferred."""
    torch = pytorch()

    side, found = torch.cuda.Stream(), {}
    for name, is_pinned, non_blocking in (
        ("pageable", False, False),
        ("pageable, non_blocking", False, True),
        ("pinned", True, False),
        ("pinned, non_blocking", True, True),
    ):
        host = torch.full((1000,), 1.0, pin_memory=is_pinned)
        device = torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        _busy(side)
        with torch.cuda.stream(side):
            device.copy_(host, non_blocking=non_blocking)
        to_waited = side.query()
        host.fill_(2.0)
        torch.cuda.synchronize()
        saw = device[0].item()
        back = torch.zeros(1000, pin_memory=is_pinned)
        torch.cuda.synchronize()
        _busy(side)
        with torch.cuda.stream(side):
            back.copy_(device, non_blocking=non_blocking)
        from_waited = side.query()
        early = back[0].item() == saw
        torch.cuda.synchronize()
        found[name] = {"to device waits": to_waited, "saw": saw, "to host waits": from_waited, "there at return": early}
    return found


@torch_
def warnings_of_synchronisation() -> dict[str, bool]:
    """Return which operations PyTorch's debug mode reports as synchronising."""
    torch = pytorch()

    x, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
    pinned, pageable = torch.ones(1000).pin_memory(), torch.ones(1000)
    mark = torch.cuda.Event()
    mark.record()
    calls: dict[str, Callable[[], Any]] = {
        "item": x[0].item,
        "nonzero": x.nonzero,
        "add": lambda: x + 1,
        "pageable to device": lambda: x.copy_(pageable),
        "pageable to device, non_blocking": lambda: x.copy_(pageable, non_blocking=True),
        "pinned to device, non_blocking": lambda: x.copy_(pinned, non_blocking=True),
        "pinned to device": lambda: x.copy_(pinned),
        "to pinned, non_blocking": lambda: pinned.copy_(x, non_blocking=True),
        "cpu": x.cpu,
        "event synchronize": mark.synchronize,
        "event query": mark.query,
        "event wait": lambda: side.wait_event(mark),
        "stream synchronize": side.synchronize,
        "device synchronize": torch.cuda.synchronize,
        "tensor of a list": lambda: torch.tensor([1.0, 2.0], device="cuda"),
        "new pinned": lambda: torch.empty(1 << 20, pin_memory=True),
        "new large": lambda: torch.empty(1 << 28, device="cuda"),
        "index with a mask": lambda: x[x > 0],
        "where": lambda: torch.where(x > 0, x, x),
        "index_put": lambda: x.index_put_((torch.zeros(1, dtype=torch.long, device="cuda"),), x[:1].clone()),
    }
    found = {}
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found[name] = any("synchroniz" in str(each.message) for each in seen)
    return found


@torch_
def allocator_reuse() -> dict[str, bool]:
    """Check when the allocator reuses a freed block: on which stream, and while which work still runs."""
    torch = pytorch()

    side, size, found = torch.cuda.Stream(), 1 << 20, {}

    def again() -> int:
        return int(torch.empty(size, device="cuda").data_ptr())

    first = torch.empty(size, device="cuda")
    at = first.data_ptr()
    del first
    found["same stream"] = again() == at
    first = torch.empty(size, device="cuda")
    at = first.data_ptr()
    del first
    with torch.cuda.stream(side):
        found["other stream"] = again() == at
    torch.cuda.synchronize()
    first = torch.empty(size, device="cuda")
    at = first.data_ptr()
    _busy(side)
    first.record_stream(side)
    del first
    found["recorded, busy"] = again() == at
    torch.cuda.synchronize()
    found["recorded, done"] = again() == at
    host = torch.empty(size, pin_memory=True)
    at = host.data_ptr()
    device = torch.empty(size, device="cuda")
    _busy(side)
    with torch.cuda.stream(side):
        device.copy_(host, non_blocking=True)
    del host
    found["pinned, busy"] = torch.empty(size, pin_memory=True).data_ptr() == at
    torch.cuda.synchronize()
    return found


@torch_
def streams_of_threads_and_of_backward() -> dict[str, Any]:
    """Return the stream of a new thread, and the thread and stream in which hooks of backward run."""
    torch = pytorch()

    found: dict[str, Any] = {}
    side = torch.cuda.Stream()
    default = torch.cuda.current_stream().cuda_stream
    found["default stream is 0"] = default == 0
    with torch.cuda.stream(side):
        thread = threading.Thread(
            target=lambda: found.update(
                {"thread's stream is the default": torch.cuda.current_stream().cuda_stream == default}
            )
        )
        thread.start()
        thread.join()
    names = {default: "default", side.cuda_stream: "side"}
    here = threading.get_ident()
    for at, where in (("forward on default", torch.cuda.default_stream()), ("forward on side", side)):
        parameter = torch.nn.Parameter(torch.ones(1000, device="cuda"))
        seen: list[Any] = []

        def note(what: str, into: list[Any] = seen) -> None:
            into.append([what, names.get(torch.cuda.current_stream().cuda_stream), threading.get_ident() == here])

        parameter.register_hook(partial(lambda note, _: note("hook"), note))
        parameter.register_post_accumulate_grad_hook(partial(lambda note, _: note("accumulated"), note))
        where.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(where):
            loss = (parameter * 2).sum()
        loss.backward()
        torch.cuda.synchronize()
        found[at] = seen
    return found


@torch_
def is_pinned() -> list[bool]:
    """Check whether PyTorch reports registered memory as pinned: all of it, a part, and memory after it."""
    torch = pytorch()

    mapping, address, _ = shared(4 * PAGE)
    register(address, 2 * PAGE)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    return [tensor.is_pinned(), tensor[PAGE : PAGE + 10].is_pinned(), tensor[3 * PAGE :].is_pinned()]


@torch_
def out_of_memory() -> list[Any]:
    """Return the error of an allocation that is too large, and whether the next operation works."""
    torch = pytorch()

    try:
        torch.empty(1 << 44, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        return [type(error).__name__, str(error).split(".")[0], torch.ones(2, device="cuda").tolist()]
    return []


@torch_
def errors_that_stay() -> list[str]:
    """Return the errors of PyTorch's calls after a failed assertion on the device."""
    torch = pytorch()

    found = []
    x, mark = torch.zeros(3, device="cuda"), torch.cuda.Event()
    mark.record()
    x[torch.tensor([99], device="cuda")]
    for call in (
        torch.cuda.synchronize,
        lambda: x + 1,
        mark.query,
        mark.synchronize,
        lambda: torch.empty(3, device="cuda"),
        x.cpu,
    ):
        try:
            call()
            found.append("no error")
        except Exception as error:  # noqa: BLE001 -- the error is the behaviour
            found.append(f"{type(error).__name__}: {str(error).splitlines()[0][:60]}")
    return found


@torch_
def dlpack_and_array_interface() -> dict[str, Any]:
    """Return what DLPack and the array interface report, and whether an import orders the streams."""
    torch = pytorch()

    x = torch.zeros(1000, device="cuda")
    host, side = torch.ones(1000).pin_memory(), torch.cuda.Stream()
    torch.cuda.synchronize()
    _busy(torch.cuda.current_stream())
    x.copy_(host, non_blocking=True)
    capsule = x.__dlpack__(stream=side.cuda_stream)
    with torch.cuda.stream(side):
        seen = torch.from_dlpack(capsule).clone()[0].item()
    interface = x.__cuda_array_interface__
    half = torch.zeros(2, device="cuda", dtype=torch.bfloat16)
    try:
        of_half: Any = half.__cuda_array_interface__["typestr"]
    except Exception as error:  # noqa: BLE001 -- the error is the behaviour
        of_half = type(error).__name__
    return {
        "import saw": seen,
        "device": list(map(int, x.__dlpack_device__())),
        "pinned device": list(map(int, host.__dlpack_device__())),
        "version": interface["version"],
        "keys": sorted(interface),
        "bfloat16": of_half,
    }


@torch_
def fork_after_the_context() -> str:
    """Return the error of PyTorch in a forked child."""
    import os  # noqa: PLC0415 -- beside the fork

    torch = pytorch()

    torch.zeros(1, device="cuda")
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            torch.zeros(1, device="cuda")
            os.write(write, b"no error")
        except Exception as error:  # noqa: BLE001 -- the error is the behaviour
            os.write(write, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(read, 1000).decode()


@torch_
def capture_of_two_streams() -> dict[str, Any]:
    """Capture work of two streams that is joined, replay it twice, and read the results."""
    torch = pytorch()

    x, y, side = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x.add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.add_(x)
        torch.cuda.current_stream().wait_stream(side)
        capturing = torch.cuda.is_current_stream_capturing()
    before = x[0].item()
    graph.replay()
    graph.replay()
    return {"capturing": capturing, "before": before, "x": x[0].item(), "y": y[0].item()}
