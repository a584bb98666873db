"""What device_staging does without a device: sizes of blocks, and refusals. tests/cuda has the copies."""

import pytest
import torch

from multiring._runtime.engines import pinned_memory
from multiring.errors import UnsupportedError
from multiring.torch import interop
from multiring.torch.device_staging import staging_of
from multiring.torch.interop import refuse_other_devices

PAGE = 4096


@pytest.mark.parametrize("size_bytes", [1, 511, 512, 513, 4096, 65535, 65536, 65537, 100_000, 1 << 20, (1 << 20) + 1])
def test_a_block_is_large_enough_and_little_is_wasted(size_bytes: int) -> None:
    size = pinned_memory._rounded(size_bytes)
    assert size >= size_bytes
    assert size <= max(512, 2 * size_bytes)
    if size >= 65536:  # such a block is registered on its own, and CUDA registers whole pages
        assert size % PAGE == 0
        assert size <= max(65536, 1.25 * size_bytes)
    else:
        assert (1 << 20) % size == 0


@pytest.mark.parametrize("kind", ["xpu", "mps", "hpu", "meta"])
def test_other_devices_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"the device is on {kind}.*host memory and CUDA devices"):
        staging_of(torch.device(kind, 0))


def test_torch_for_rocm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interop, "_ROCM", "6.4")
    with pytest.raises(UnsupportedError, match=r"x is on cuda:0 of torch for ROCm 6\.4; multiring serves"):
        refuse_other_devices(torch.device("cuda", 0), "x")
