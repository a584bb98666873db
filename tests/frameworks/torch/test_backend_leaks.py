"""Create and destroy a hundred process groups; nothing may leak.

The tests count files, threads, mappings and memory.
"""

import gc
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tests.support.joined import join_torch
from tests.support.ranks import Here, run_ranks

import multiring.torch  # noqa: F401 -- for a torch that does not load backends by itself

isend: Any = dist.isend  # torch's type includes None, for ranks outside the group
irecv: Any = dist.irecv

CYCLES, WARM = 100, 20
# These bounds allow for the allocator's slack. A leaked group would hold many times as much: threads, programs and
# slots in the arena.
MAPPINGS, MEMORY_BYTES = 8, 4 << 20


class Held(NamedTuple):
    """The resources of this process that may leak."""

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
    """Return whether `late` exceeds `early` by the allocator's slack at most."""
    return (
        late.files <= early.files
        and late.threads <= early.threads
        and late.mappings <= early.mappings + MAPPINGS
        and late.memory_bytes <= early.memory_bytes + MEMORY_BYTES
    )


def held_no_more_than(early: Held) -> Held:
    """Return the held resources once they fit `early`, or after 60 s.

    Threads may take a while to end.
    """
    deadline_s = time.monotonic() + 60
    while not fits(late := held(), early) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return late


def use(group: Any, rank: int) -> None:
    """Use each feature of the group once, so that it allocates all its resources."""
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, group=group)
    dist.all_gather([torch.empty_like(tensor) for _ in range(2)], tensor, group)
    works = isend(tensor, group=group, group_dst=1 - rank), irecv(tensor.clone(), group=group)
    for work in works:
        work.wait()
    dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()
    irecv(tensor.clone(), group=group, tag=5)  # never matched: the group's end discards it
    group.monitored_barrier()


def use_all_streams() -> None:
    """Use each of the 32 streams of a device that torch hands out in turn: a new group gets the next one."""
    if torch.cuda.is_initialized():
        for _ in range(32):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.ones(1)


def within_a_job(here: Here, rendezvous: str) -> tuple[Held, Held]:
    join_torch(here, rendezvous)
    use_all_streams()
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
    use_all_streams()
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
