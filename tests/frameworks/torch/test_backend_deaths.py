"""A rank is killed in each kind of operation.

Every other rank raises torch's error, which names the killed rank, and can continue.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.support.faults import freeze, kill
from tests.support.joined import PATIENCE, join_torch
from tests.support.ranks import Here, report_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import multiring.torch  # noqa: F401 -- for a torch that does not load backends by itself

wait_tensor: Any = functional.wait_tensor
SIZE = 30_000
MEMBERS = 3  # two survivors, ranks 0 and 1, and the victim, the group's last rank
Kind = Callable[[Any, Tensor], Any]


def parts(tensor: Tensor) -> list[Tensor]:
    return [torch.empty_like(tensor) for _ in range(MEMBERS)]


def is_first(group: Any) -> bool:
    return bool(group.rank() == 0)


def to_the_victim(group: Any, tensor: Tensor) -> None:
    """Send from the survivors to the victim, which receives from both."""
    if group.rank() == MEMBERS - 1:
        for rank in range(MEMBERS - 1):
            dist.recv(tensor, group=group, group_src=rank)
    else:
        dist.send(tensor, group=group, group_dst=MEMBERS - 1)


def from_the_victim(group: Any, tensor: Tensor, *, names_source: bool) -> None:
    """Send from the victim to the survivors."""
    if group.rank() == MEMBERS - 1:
        for rank in range(MEMBERS - 1):
            dist.send(tensor, group=group, group_dst=rank)
    else:
        dist.recv(tensor, group=group, group_src=MEMBERS - 1 if names_source else None)


def trained(group: Any, tensor: Tensor) -> None:
    """Run a step of DistributedDataParallel."""
    if "model" not in vars(group):
        group.model = DistributedDataParallel(nn.Linear(100, 300), process_group=group)
    group.model(tensor[:100]).sum().backward()


KINDS: dict[str, Kind] = {
    "all_reduce": lambda group, tensor: dist.all_reduce(tensor, group=group),
    "all_reduce, async": lambda group, tensor: dist.all_reduce(tensor, group=group, async_op=True).wait(),
    "all_reduce, a future": lambda group, tensor: group.allreduce([tensor]).get_future().wait(),
    "all_reduce, functional": lambda group, tensor: wait_tensor(functional.all_reduce(tensor, "sum", group)),
    "all_reduce, bitwise": lambda group, tensor: dist.all_reduce(tensor.int(), dist.ReduceOp.BAND, group),
    "all_reduce_coalesced": lambda group, tensor: group.allreduce_coalesced([tensor, tensor[:9].clone()]).wait(),
    "reduce": lambda group, tensor: dist.reduce(tensor, group=group, group_dst=1),
    "broadcast": lambda group, tensor: dist.broadcast(tensor, group=group, group_src=MEMBERS - 1),
    "all_gather": lambda group, tensor: dist.all_gather(parts(tensor), tensor, group),
    "all_gather_single": lambda group, tensor: group.all_gather_single(torch.cat(parts(tensor)), tensor).wait(),
    "all_gather_object": lambda group, _: dist.all_gather_object([None] * MEMBERS, "text", group),
    "reduce_scatter": lambda group, tensor: dist.reduce_scatter(tensor, parts(tensor), group=group),
    "reduce_scatter_single": lambda group, tensor: group.reduce_scatter_single(tensor, torch.cat(parts(tensor))).wait(),
    "all_to_all": lambda group, tensor: dist.all_to_all(parts(tensor), parts(tensor), group),
    "all_to_all_single": lambda group, tensor: dist.all_to_all_single(torch.empty_like(tensor), tensor, group=group),
    "gather": lambda group, tensor: dist.gather(tensor, parts(tensor) if is_first(group) else None, group=group),
    "scatter": lambda group, tensor: dist.scatter(tensor, parts(tensor) if is_first(group) else None, group=group),
    "barrier": lambda group, _: dist.barrier(group),
    "monitored_barrier": lambda group, _: group.monitored_barrier(),
    "send": to_the_victim,
    "recv": lambda group, tensor: from_the_victim(group, tensor, names_source=True),
    "recv, any source": lambda group, tensor: from_the_victim(group, tensor, names_source=False),
    "a step of DDP": trained,
}
SURVIVORS = MEMBERS - 1


def live(here: Here, rendezvous: str, kinds: list[str]) -> dict[str, tuple[str, str]]:
    """Kill another rank in each kind of operation; return a survivor's errors by kind."""
    join_torch(here, rendezvous)
    groups = [dist.new_group([*range(SURVIVORS), SURVIVORS + index]) for index in range(len(kinds))]
    dist.barrier()
    told = {}
    for index, kind in enumerate(kinds):
        if here.rank in {*range(SURVIVORS), SURVIVORS + index}:
            told[kind] = repeat(kind, groups[index], dies=here.rank >= SURVIVORS)
    total = torch.ones(5)
    pair = groups[-1]
    assert pair is not None
    survivors: Any = dist.new_group(list(range(SURVIVORS)), use_local_synchronization=True)
    dist.all_reduce(total, group=survivors)
    assert (total == SURVIVORS).all()
    return told


def repeat(kind: str, group: Any, *, dies: bool) -> tuple[str, str]:
    """Repeat an operation until it fails, and return the error.

    With `dies`, this rank is killed during an operation.
    """
    tensor = torch.ones(SIZE)
    KINDS[kind](group, tensor)
    if dies:
        threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            KINDS[kind](group, tensor)
    except RuntimeError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(("engine", "first", "step"), [("shm", 0, 2), ("shm", 1, 2), ("tcp", 0, 5)])
def test_in_each_kind(tmp_path: Path, engine: str, first: int, step: int) -> None:
    kinds = list(KINDS)[first::step]
    ranks = SURVIVORS + len(kinds)
    report = report_of(live, ranks, str(tmp_path / "meeting"), kinds, engine=engine)
    for outcome in report.outcomes[:SURVIVORS]:
        assert outcome.error is None, outcome
        for index, kind in enumerate(kinds):
            name, text = outcome.value[kind]
            assert name in {"DistBackendError", "RuntimeError"}, (kind, name, text)
            # monitored_barrier numbers ranks by the group, as in torch.
            victim = MEMBERS - 1 if kind == "monitored_barrier" else SURVIVORS + index
            assert f"rank {victim}" in text.lower(), (kind, text)
    for outcome in report.outcomes[SURVIVORS:]:
        assert outcome.exit_code == -signal.SIGKILL, outcome


def uncaught(here: Here, rendezvous: str) -> None:
    join_torch(here, rendezvous)
    tensor = torch.ones(SIZE)
    dist.all_reduce(tensor)
    here.reach("at work")
    while True:
        dist.all_reduce(tensor)


def test_uncaught(tmp_path: Path) -> None:
    """Ranks that end after another rank's death do not hide which rank died."""
    report = report_of(uncaught, 4, str(tmp_path / "meeting"), faults=[kill(2).at("at work").after(0.05)])
    for outcome in report.outcomes:
        if outcome.rank != 2:
            assert isinstance(outcome.error, dist.DistBackendError), outcome
            assert "rank 2" in str(outcome.error)


def beside_an_abort(here: Here, rendezvous: str, lead_s: float) -> dict[str, str]:
    """Return each operation's error in a group that the last rank aborts.

    The abort comes `lead_s` seconds before the operation, or after it if `lead_s` is negative.
    """
    join_torch(here, rendezvous)
    groups: list[Any] = [dist.new_group(timeout=PATIENCE) for _ in KINDS]
    told = {}
    for (kind, call), group in zip(KINDS.items(), groups, strict=True):
        dist.barrier()
        # The sleeps make an order likely: the others wait already, or the abort is done. The test passes in any order.
        if here.rank == MEMBERS - 1:
            time.sleep(max(0.0, -lead_s))
            group.abort()
            continue
        time.sleep(max(0.0, lead_s))
        try:
            call(group, torch.ones(SIZE))
        except RuntimeError as error:
            told[kind] = str(error)
    dist.barrier()
    dist.destroy_process_group()
    return told


@pytest.mark.parametrize(("engine", "lead_s"), [("shm", -0.1), ("shm", 0.1), ("tcp", -0.1)])
def test_an_abort_is_told(tmp_path: Path, engine: str, lead_s: float) -> None:
    report = report_of(beside_an_abort, MEMBERS, str(tmp_path / "meeting"), lead_s, engine=engine)
    for outcome in report.outcomes:
        assert outcome.error is None, outcome
    for outcome in report.outcomes[: MEMBERS - 1]:
        for kind in KINDS:
            text = outcome.value.get(kind, "nothing")
            # The first text is for a rank that was waiting, the second for a rank that called later.
            told = f"rank {MEMBERS - 1} aborted the group", f"was aborted by rank {MEMBERS - 1}"
            assert any(each in text for each in told), (kind, text)


SILENT: dict[str, Kind] = {kind: KINDS[kind] for kind in ("all_reduce", "gather", "recv")}


def beside_a_silent_rank(here: Here, rendezvous: str) -> dict[str, tuple[str, str]]:
    """Return each operation's error when the last rank does not respond."""
    world: Any = join_torch(here, rendezvous)
    groups: list[Any] = [dist.new_group(timeout=timedelta(seconds=1)) for _ in SILENT]
    for group in groups:
        dist.barrier(group, timeout=PATIENCE)
    if here.rank == MEMBERS - 1:
        here.reach("silent")
        time.sleep(1000)
    time.sleep(0.2)  # the last rank has stopped by now; it takes no part in any case
    told = {}
    for (kind, call), group in zip(SILENT.items(), groups, strict=True):
        try:
            call(group, torch.ones(SIZE))
        except dist.DistBackendError as error:
            told[kind] = type(error).__name__, str(error)
    world.abort()  # a normal end would wait for the silent rank
    return told


def test_silence(tmp_path: Path) -> None:
    """After the group's time-out, errors name a rank that lives but does nothing."""
    fault = freeze(MEMBERS - 1).at("silent")
    report = report_of(beside_a_silent_rank, MEMBERS, str(tmp_path / "meeting"), faults=[fault])
    survivors = report.outcomes[: MEMBERS - 1]
    for outcome in survivors:
        assert outcome.error is None, outcome
        assert outcome.value.keys() == SILENT.keys()
    for kind in SILENT:
        told = [outcome.value[kind] for outcome in survivors]
        assert [name for name, _ in told] == ["DistBackendError"] * len(survivors)
        # If the machine delays a survivor for the whole time-out, the other survivor may give up on it. The delayed
        # survivor then gets an error about this.
        assert any(
            f"from rank {MEMBERS - 1} within" in text or f", {MEMBERS - 1} within" in text for _, text in told
        ), told
