"""Point-to-point messages, gather, scatter and objects, as torch documents them."""

import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.joined import join_torch
from tests.support.ranks import Here, run_ranks
from torch import Tensor

import multiring.torch  # noqa: F401 -- for a torch that does not load backends by itself

isend: Any = dist.isend  # torch's type includes None, for ranks outside the group
irecv: Any = dist.irecv

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


def letter(sender: int, receiver: int, tag: int, number: int, count: int = 5) -> Tensor:
    return torch.arange(count) + 1000 * (((sender * 10 + receiver) * 10 + tag) * 10 + number)


def expect(tensor: Tensor, sender: int, receiver: int, tag: int, number: int) -> None:
    assert torch.equal(tensor, letter(sender, receiver, tag, number, tensor.numel())), tensor


def everything(here: Here, rendezvous: str) -> None:
    """Run all checks of messages in one job."""
    join_torch(here, rendezvous)
    for check in (
        *(any_order, any_source, mixed_sources, in_a_batch, to_oneself, every_type, in_pieces, futures),
        *(gathered_and_scattered, objects, in_a_subgroup, by_the_group, refused),
    ):
        check(here)
        dist.barrier()
    dist.destroy_process_group()


def others(here: Here) -> list[int]:
    return [rank for rank in range(here.size) if rank != here.rank]


def any_order(here: Here) -> None:
    """Each rank posts its sends and receives of two tags in its own order."""
    plan = list(itertools.product(others(here), (0, 3), range(2)))
    plan.sort(key=lambda each: (each[2], (each[0] + each[1] + here.rank) % here.size))
    works, got = [], {}
    for side in (("send", "recv"), ("recv", "send"))[here.rank % 2]:
        for peer, tag, number in plan:
            if side == "send":
                works.append(isend(letter(here.rank, peer, tag, number), peer, tag=tag))
            else:
                got[peer, tag, number] = torch.empty(5, dtype=torch.int64)
                works.append(irecv(got[peer, tag, number], peer, tag=tag))
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
    for (peer, tag, number), tensor in got.items():
        expect(tensor, peer, here.rank, tag, number)


def any_source(here: Here) -> None:
    """Run torch's own test: each rank in turn receives twice from every other rank.

    Each receive must report its source.
    """
    tensor, seen = torch.full((4, 4), here.rank), []
    for receiver in range(here.size):
        if receiver != here.rank:
            for _ in range(2):
                dist.send(tensor, receiver)
            continue
        for _ in others(here):
            out = torch.full((4, 4), -1)
            seen.append(dist.recv(out))
            assert out.eq(seen[-1]).all()
            work = irecv(out.fill_(-1))
            work.wait()
            seen.append(work._source_rank())
            assert out.eq(seen[-1]).all()
    assert sorted(seen) == sorted(others(here) * 2)


def mixed_sources(here: Here) -> None:
    """A receive from one rank must not overtake an earlier receive from any rank."""
    if here.rank == 0:
        anyone, second = torch.empty(5, dtype=torch.int64), torch.empty(5, dtype=torch.int64)
        works = irecv(anyone, tag=1), irecv(second, 1, tag=1)
        dist.barrier()
        for work in reversed(works):
            work.wait()
        assert works[0]._source_rank() == 1
        expect(anyone, 1, 0, 1, 0)
        expect(second, 1, 0, 1, 1)
    else:
        dist.barrier()
        if here.rank == 1:
            for number in range(2):
                dist.send(letter(1, 0, 1, number), 0, tag=1)


def in_a_batch(here: Here) -> None:
    """Exchange in a ring, receives first: all operations are posted before any wait."""
    right, left = (here.rank + 1) % here.size, (here.rank - 1) % here.size
    out = torch.empty(300_000, dtype=torch.int64)
    ops = [
        dist.P2POp(dist.irecv, out, left),
        dist.P2POp(dist.isend, letter(here.rank, right, 0, 0, 300_000), right),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    expect(out, left, here.rank, 0, 0)


def to_oneself(here: Here) -> None:
    out, tensor = torch.zeros(5, dtype=torch.int64), letter(here.rank, here.rank, 2, 0)
    received = irecv(out, here.rank, tag=2)
    isend(tensor, here.rank, tag=2).wait()
    tensor.zero_()  # the send copied it
    received.wait()
    expect(out, here.rank, here.rank, 2, 0)
    with pytest.raises(ValueError, match="should not be the same as the rank of the current process"):
        dist.send(tensor, here.rank)


def every_type(here: Here) -> None:
    peer = here.rank ^ 1
    if peer >= here.size:
        return
    for dtype in DTYPES:
        for shape in ((), (0,), (3, 7)):
            tensor = torch.ones(shape).to(dtype)
            out = torch.zeros(shape).to(dtype)
            works = irecv(out, peer), isend(tensor, peer)
            for work in works:
                work.wait()
            assert torch.equal(
                out.double() if not dtype.is_complex else out,
                torch.ones(shape, dtype=out.dtype if dtype.is_complex else torch.float64),
            )


def in_pieces(here: Here) -> None:
    """Send and receive tensors that are not contiguous, and change the shape."""
    peer = here.rank ^ 1
    if peer >= here.size:
        return
    tensor = torch.arange(24).reshape(4, 6)
    for sent, out in (
        (tensor.t(), torch.zeros(6, 4, dtype=torch.int64)),
        (tensor[:, ::2], torch.zeros(24, dtype=torch.int64)[::2]),
        (tensor, torch.zeros(6, 4, dtype=torch.int64).t()),
    ):
        works = irecv(out, peer), isend(sent, peer)
        for work in works:
            work.wait()
        assert torch.equal(out.reshape(-1), sent.reshape(-1))


def futures(here: Here) -> None:
    """A message's future completes without a wait, in any order of arrival."""
    if here.rank == 0:
        outs = [torch.empty(5, dtype=torch.int64) for _ in others(here)]
        found = [irecv(out, rank, tag=4).get_future() for out, rank in zip(outs, others(here), strict=True)]
        dist.barrier()
        for future, rank in zip(found, others(here), strict=True):
            (out,) = future.wait()
            expect(out, rank, 0, 4, 0)
    else:
        dist.barrier()
        isend(letter(here.rank, 0, 4, 0), 0, tag=4).wait()


def gathered_and_scattered(here: Here) -> None:
    for root, dtype, count in itertools.product(
        range(here.size), (torch.float32, torch.complex64, torch.bool), (0, 70_000)
    ):
        parts = [torch.arange(count).add(rank).to(dtype) for rank in range(here.size)]
        whole = torch.zeros(here.size, count, dtype=dtype)
        for places in (list(whole), [torch.zeros_like(part) for part in parts]):
            is_root = here.rank == root
            dist.gather(parts[here.rank], places if is_root else None, root)
            if is_root:
                assert all(map(torch.equal, places, parts))
            out = torch.zeros_like(parts[0])
            work = dist.scatter(out, parts if is_root else None, root, async_op=True)
            work.wait()
            assert torch.equal(out, parts[here.rank])
    # The root's own part is already in its place in the output.
    whole = torch.full((here.size, 3), float(here.rank))
    dist.gather(whole[here.rank], list(whole) if here.rank == 0 else None)
    if here.rank == 0:
        assert torch.equal(whole[:, 0], torch.arange(float(here.size)))


def objects(here: Here) -> None:
    mine = {"rank": here.rank, "text": "x" * 1000 * here.rank}
    found: list[Any] = [None] * here.size
    dist.gather_object(mine, found if here.rank == 1 else None, dst=1)
    if here.rank == 1:
        assert [each["rank"] for each in found] == list(range(here.size))
        assert len(found[-1]["text"]) == 1000 * (here.size - 1)
    got: list[Any] = [None]
    dist.scatter_object_list(got, [{"for": rank} for rank in range(here.size)] if here.rank == 0 else None, src=0)
    assert got == [{"for": here.rank}]
    if here.rank == 0:
        dist.send_object_list([mine, "second"], 1)
    elif here.rank == 1:
        got = [None, None]
        assert dist.recv_object_list(got, 0) == 0
        assert got == [{"rank": 0, "text": ""}, "second"]
    got = [mine if here.rank == 0 else None]
    dist.broadcast_object_list(got, 0)
    assert got[0]["rank"] == 0


def in_a_subgroup(here: Here) -> None:
    """`src` and `dst` are ranks of the job; `group_src` and `group_dst` of the group."""
    group: Any = dist.new_group([here.size - 2, here.size - 1])
    out = torch.empty(5, dtype=torch.int64)
    if here.rank == here.size - 2:
        dist.send(letter(here.rank, here.rank + 1, 0, 0), here.rank + 1, group)
    elif here.rank == here.size - 1:
        assert dist.recv(out, group=group) == here.rank - 1
        expect(out, here.rank - 1, here.rank, 0, 0)
    if here.rank >= here.size - 2:
        peer = 1 - group.rank()
        works = (
            irecv(out, group=group, group_src=peer),
            isend(letter(here.rank, 0, 1, 1), group=group, group_dst=peer),
        )
        for work in works:
            work.wait()
        expect(out, 2 * here.size - 3 - here.rank, 0, 1, 1)
        dist.destroy_process_group(group)


def by_the_group(here: Here) -> None:
    """Call the group's own methods, as some programs do."""
    group: Any = dist.group.WORLD
    whole = [torch.zeros(2) for _ in range(here.size)]
    group.gather(whole if here.rank == 0 else [], torch.full((2,), float(here.rank)), 0).wait()
    out = torch.zeros(2)
    group.scatter(out, whole if here.rank == 0 else [], 0, timeout=timedelta(seconds=50)).wait()
    assert torch.equal(out, torch.full((2,), float(here.rank)))


def refused(here: Here) -> None:
    """Invalid arguments raise torch's errors before anything is sent."""
    group: Any = dist.group.WORLD
    one, peer = torch.zeros(3), (here.rank + 1) % here.size
    with pytest.raises(RuntimeError, match="Tag must be nonnegative, got -1"):
        isend(one, peer, tag=-1).wait()
    for tag, told in ((1 << 63, f"tag={1 << 63}: want at most"), (1.5, r"tag=1\.5: want an integer")):
        for call in (isend, irecv):
            with pytest.raises(ValueError, match=told):
                call(one, peer, tag=tag).wait()
        with pytest.raises(ValueError, match=told):
            irecv(one, None, tag=tag).wait()
    with pytest.raises(RuntimeError, match=r"on meta\. No backend type associated with device type meta"):
        isend(one.to("meta"), peer)
    with pytest.raises(ValueError, match="sparse"):
        irecv(one.to_sparse(), peer)
    with pytest.raises(ValueError, match="got 2 tensors; want one"):
        group.send([one, one], peer, 0).wait()  # tensors of devices are checked after the call
    with pytest.raises(ValueError, match=f"invalid source rank {here.size}"):
        group.recv([one], here.size, 0).wait()
    with pytest.raises(
        ValueError, match=f"want one for each of the {here.size} ranks" if here.rank == 0 else "only on the root"
    ):
        group.gather([[one]], [one], 0).wait()
    with pytest.raises(RuntimeError, match="only a receive has a source"):
        isend(one, here.rank, tag=9)._source_rank()
    if here.rank < 2:  # the receive expects more bytes than are sent
        work = isend(one, 1, tag=7) if here.rank == 0 else irecv(torch.zeros(4), 0, tag=7)
        with pytest.raises(dist.DistBackendError, match=r"rank [01], tag 7.*the ranks do not agree"):
            work.wait()


@pytest.mark.parametrize(("engine", "ranks"), [("shm", 3), ("tcp", 2)])
def test_everything(tmp_path: Path, engine: str, ranks: int) -> None:
    run_ranks(everything, ranks, str(tmp_path / "meeting"), engine=engine)


def timed_out(here: Here, rendezvous: str) -> None:
    """A late message fails, and the error names the rank that did not send.

    Collectives continue to work.
    """
    join_torch(here, rendezvous)
    group: Any = dist.group.WORLD
    if here.rank == 0:
        group.set_timeout(timedelta(seconds=0.2))
        with pytest.raises(
            dist.DistBackendError, match=r"recv of .* from rank 1, tag 0: timed out.*from rank 1 within 0\.2 s"
        ):
            dist.recv(torch.zeros(1), 1)
        with pytest.raises(
            dist.DistBackendError, match=r"recv of .* from any rank, tag 1: timed out.*rank 1, 2 within"
        ):
            dist.recv(torch.zeros(1), tag=1)
        work = irecv(torch.zeros(1), tag=2)
        with pytest.raises(dist.DistBackendError, match=r"in flight after 0\.01 s"):
            work.wait(timedelta(seconds=0.01))
        group.set_timeout(timedelta(seconds=100))
    dist.barrier()
    if here.rank == 1:
        dist.send(torch.full((1,), 7.0), 0, tag=3)
    elif here.rank == 0:
        assert dist.recv(out := torch.zeros(1), tag=3) == 1
        assert out == 7
    total = torch.ones(3)
    dist.all_reduce(total)
    assert (total == here.size).all()
    dist.destroy_process_group()
    with pytest.raises(dist.DistBackendError, match="was destroyed"):
        group.send([torch.zeros(1)], (here.rank + 1) % here.size, 0)


def test_timed_out(tmp_path: Path) -> None:
    run_ranks(timed_out, 3, str(tmp_path / "meeting"))
