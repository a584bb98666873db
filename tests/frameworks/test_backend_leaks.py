"""Process groups come and go a hundred times and leave nothing: no file, thread, mapping or memory."""

import gc
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tests.frameworks.joined import join_torch
from tests.wire.ranks import Here, run_ranks

import multiring.torch  # noqa: F401 -- where torch does not load its backends by itself

isend: Any = dist.isend  # torch says None, which is for ranks that are not in the group
irecv: Any = dist.irecv

CYCLES, WARM = 100, 20
# The allocator's slack: a group that stayed would hold threads, programs and slots in the arena, many times as much.
MAPPINGS, MEMORY_BYTES = 8, 4 << 20


class Held(NamedTuple):
    """What this process has of what may leak."""

    files: int
    threads: int
    mappings: int
    memory_bytes: int


def held() -> Held:
    gc.collect()
    own = Path("/proc/self")
    resident_pages = int((own / "statm").read_text().split()[1])
    return Held(
        files=len(list((own / "fd").iterdir())),
        threads=len(list((own / "task").iterdir())),
        mappings=len((own / "maps").read_text().splitlines()),
        memory_bytes=resident_pages * 4096,
    )


def fits(late: Held, early: Held) -> bool:
    """Whether no more is held, but for the allocator's slack."""
    return (
        late.files <= early.files
        and late.threads <= early.threads
        and late.mappings <= early.mappings + MAPPINGS
        and late.memory_bytes <= early.memory_bytes + MEMORY_BYTES
    )


def held_no_more_than(early: Held) -> Held:
    """Return what is held once it fits `early`, or after a while: threads that were told to end may not have yet."""
    deadline_s = time.monotonic() + 20
    while not fits(late := held(), early) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return late


def use(group: Any, rank: int) -> None:
    """Do a little of everything, so that whatever a group makes when first asked is made."""
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, group=group)
    dist.all_gather([torch.empty_like(tensor) for _ in range(2)], tensor, group)
    works = isend(tensor, group=group, group_dst=1 - rank), irecv(tensor.clone(), group=group)
    for work in works:
        work.wait()
    dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()
    irecv(tensor.clone(), group=group, tag=5)  # nobody sends: it goes with the group
    group.monitored_barrier()


def within_a_job(here: Here, rendezvous: str) -> tuple[Held, Held]:
    join_torch(here, rendezvous)
    early = held()
    for cycle in range(CYCLES):
        group = dist.new_group([0, 1])
        use(group, here.rank)
        dist.destroy_process_group(group)
        del group
        if cycle == WARM:
            dist.barrier()
            early = held()
    late = held_no_more_than(early)
    dist.barrier()
    dist.destroy_process_group()
    return early, late


def whole_jobs(here: Here, rendezvous: str) -> tuple[Held, Held]:
    early = held()
    for cycle in range(CYCLES):
        group = join_torch(here, f"{rendezvous}-{cycle}")
        use(group, here.rank)
        dist.barrier()
        del group
        dist.destroy_process_group()
        if cycle == WARM:
            early = held()
    return early, held_no_more_than(early)


def expect_the_same(results: list[tuple[Held, Held]]) -> None:
    for early, late in results:
        assert fits(late, early), (early, late)


def test_within_a_job(tmp_path: Path) -> None:
    expect_the_same(run_ranks(within_a_job, 2, str(tmp_path / "meeting")))


def test_whole_jobs(tmp_path: Path) -> None:
    expect_the_same(run_ranks(whole_jobs, 2, str(tmp_path / "meeting")))
