"""This rank's GPU: chosen by its rank on the host, and made current when the program first uses CUDA."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import multiring.torch as mt
from multiring._frontend import lifecycle
from multiring.errors import UnsupportedError


class Cuda:
    """torch.cuda on a host with some GPUs."""

    def __init__(self, gpus: int, *, current: int = 0) -> None:
        self.gpus, self.current = gpus, current
        self.is_initialised = False
        self.delayed: list[Callable[[], object]] = []

    def device_count(self) -> int:
        return self.gpus

    def current_device(self) -> int:
        assert self.is_initialised, "asking for the device takes memory on it"
        return self.current

    def set_device(self, index: int) -> None:
        assert self.is_initialised
        self.current = index

    def _lazy_call(self, call: Callable[[], object]) -> None:
        self.delayed.append(call)

    def use(self) -> int:
        self.is_initialised = True
        for each in self.delayed:
            each()
        return self.current


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def placed(cuda: Cuda, rank: int, ranks: int, *, hip: str | None = None) -> None:
        joined = [False]
        for name in ("device_count", "current_device", "set_device", "_lazy_call"):
            monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(lifecycle, "local_rank", lambda: rank)
        monkeypatch.setattr(lifecycle, "local_size", lambda: ranks)
        monkeypatch.setattr(lifecycle, "is_initialized", lambda: joined[0])
        monkeypatch.setattr(lifecycle, "init", lambda *_: joined.__setitem__(0, True))

    return placed


@pytest.mark.parametrize(
    ("gpus", "rank", "ranks", "index"), [(4, 3, 4, 3), (4, 1, 2, 1), (2, 3, 4, 1), (1, 3, 4, 0), (8, 0, 1, 0)]
)
def test_each_rank_of_a_host_has_a_gpu(at: Callable[..., Any], gpus: int, rank: int, ranks: int, index: int) -> None:
    cuda = Cuda(gpus)
    at(cuda, rank, ranks)
    mt.init()
    assert mt.local_device() == torch.device("cuda", index)
    assert cuda.current == 0
    assert cuda.use() == index


def test_a_device_that_the_program_has_selected_stays(at: Callable[..., Any]) -> None:
    cuda = Cuda(4, current=2)
    at(cuda, 3, 4)
    mt.init()
    assert cuda.use() == 2


def test_a_second_init_selects_nothing(at: Callable[..., Any]) -> None:
    cuda = Cuda(4)
    at(cuda, 3, 4)
    mt.init()
    mt.init()
    assert len(cuda.delayed) == 1


def test_ranks_that_share_a_gpu_are_told_once(at: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    said = "4 ranks of this host share 2 GPUs; start 2 ranks to give each a GPU of its own (several "
    said += "GPUs: verified without GPUs only)"
    with caplog.at_level(logging.WARNING, "multiring"):
        at(Cuda(2), 1, 4)
        mt.init()
        assert not caplog.messages
        at(Cuda(2), 0, 4)
        mt.init()
    assert caplog.messages == [said]


def test_devices_of_other_kinds_are_refused_by_name(at: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    at(Cuda(2), 0, 1, hip="6.2")
    mt.init()
    with pytest.raises(UnsupportedError, match=r"devices of the type ROCm: want CUDA, or torch\.device\('cpu'\)"):
        mt.local_device()
    at(Cuda(0), 0, 1)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    with pytest.raises(UnsupportedError, match="devices of the type XPU"):
        mt.local_device()


def test_without_gpus_the_device_is_the_host(at: Callable[..., Any]) -> None:
    cuda = Cuda(0)
    at(cuda, 1, 2)
    mt.init()
    assert mt.local_device() == torch.device("cpu")
    assert not cuda.delayed
