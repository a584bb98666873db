"""Ranks that wait for each other in groups on devices, on stand-ins of CUDA and NCCL: as in host memory."""

from typing import Any

import pytest
from tests.standin.build import built
from tests.standin.loading import load
from tests.support.cuda_ranks import device_array
from tests.support.ranks import Here, run_ranks

from multiring.errors import MultiringError, StallError

OLD_NCCL, NCCL = 21700, 22809
SETTINGS: dict[str, Any] = {"stall_warn_s": 3.0, "stall_timeout_s": 60.0}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    built()


def stand(here: Here, version: int, orders: bool) -> tuple[str, str, str]:  # noqa: FBT001 -- of `run_ranks`
    """Wait in a group of one's own; return the engine, and the error."""
    host = here.join(**SETTINGS)
    load(devices=4, nccl=version)
    group = host.on_device(here.rank)
    others = group.twin(), group.twin()  # several groups on a device: no operation starts before its agreement
    for each in others:
        each.all_reduce(device_array(each, [1.0, 2.0]))
    handle: Any = others[here.rank].all_reduce_async(device_array(group, [1.0, 2.0]))
    with pytest.raises(MultiringError) as raised:
        handle.order(0) if orders else handle.wait()
    assert group.calls.engine is not None
    return group.calls.engine.name, type(raised.value).__name__, str(raised.value)


@pytest.mark.parametrize("version", [NCCL, OLD_NCCL])
@pytest.mark.parametrize("orders", [False, True])
def test_a_standoff_is_an_error_on_all_ranks(version: int, orders: bool) -> None:  # noqa: FBT001 -- of pytest
    for name, kind, text in run_ranks(stand, 2, version, orders, engine="shm"):
        assert name == ("nccl" if version == NCCL else "staged")
        assert kind == StallError.__name__, text
        for rank in range(2):
            assert f"rank {rank} is at test_standoffs_on_devices.py" in text, text
        assert "in stand (handle.order(0) if orders else handle.wait())" in text, text
        assert "a circle, in which each rank waits" in text, text
