"""Process groups of backend "multiring": rendezvous, subgroups and cleanup."""

import os
import re
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from tests.support.grouped_ranks import dist, enter, expect
from tests.support.plain import backward, loss_of, network
from tests.support.ranks import Here, run_ranks
from torch.distributed import DistBackendError, DistStoreError
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import multiring
import multiring.torch as mt
from multiring.errors import StateError

ALONE = """
import sys
import torch
assert "multiring" in torch.distributed.Backend.backend_list
assert "multiring" not in sys.modules  # torch imports it on first use
store = torch.distributed.HashStore()
torch.distributed.init_process_group("multiring", store=store, rank=0, world_size=1)
tensor = torch.ones(3)
torch.distributed.all_reduce(tensor)
assert tensor.tolist() == [1.0] * 3
print(torch.distributed.get_backend(), "serves")
"""


def test_torch_finds_it_by_its_entry_point() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False, timeout=240)
    assert done.stdout == "multiring serves\n", done.stderr


def test_meeting_and_groups(tmp_path: Path) -> None:
    run_ranks(use_groups, 4, str(tmp_path))


def use_groups(here: Here, place: str) -> None:
    meet_again(here, place)
    be_part_of_the_users_job(here, place)
    whole: Any = enter(here, f"{place}/groups")
    say_who_they_are(whole, here)
    make_smaller_groups(here)
    be_alone()
    split(whole, here)
    train(here)
    dist.destroy_process_group()
    beside_gloo(here, place)
    beside_other_devices(here, place)
    assert not multiring.is_initialized()
    deadline_s = time.monotonic() + 240  # the threads of device tensors end a moment after their group
    while threads := [each.name for each in threading.enumerate() if "multiring" in each.name]:
        assert time.monotonic() < deadline_s, threads
        time.sleep(0.01)


def meet_again(here: Here, place: str) -> None:
    """Make a group through one store three times; earlier arrays stay intact."""
    kept = None
    for _ in range(3):
        enter(here, f"{place}/again")
        group: Any = dist.group.WORLD
        tensor = group.allocate_tensor(5, dtype=torch.bfloat16).fill_(here.rank)
        dist.all_reduce(tensor)
        if kept is not None:
            assert kept.tolist() == [6.0] * 5
        kept = tensor
        assert multiring.rank() == here.rank
        expect(mt.allreduce(torch.ones(2), op=mt.Sum), torch.full((2,), 4.0))  # uses the same job
        dist.destroy_process_group()
        with pytest.raises(DistBackendError, match="all_reduce: the process group was destroyed"):
            group.allreduce([tensor])
        assert not multiring.is_initialized()


def be_part_of_the_users_job(here: Here, place: str) -> None:
    """Make a group in the user's own job, and leave that job open."""
    own = here.join()
    store = dist.FileStore(f"{place}/other", 4)
    with pytest.raises(RuntimeError, match=re.escape(f"rank {here.rank} of 4, but torch says rank 0 of 1")):
        dist.init_process_group("multiring", store=store, rank=0, world_size=1)
    enter(here, f"{place}/users")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    whole = tensor.cpu()  # a Group of host memory refuses tensors of devices
    own.all_reduce(whole)
    assert whole.tolist() == [16.0, 16.0]
    dist.destroy_process_group()
    own.barrier()
    if here.rank == 0:
        multiring.shutdown()
    with pytest.raises((RuntimeError, DistBackendError), match=re.escape("ranks [0] have not called multiring.init")):
        enter(here, f"{place}/users")
    multiring.shutdown()
    dist.distributed_c10d._world.group_count = 0  # torch leaves this count after a failed start


def say_who_they_are(whole: Any, here: Here) -> None:
    """Check a group's names, ranks and other attributes that torch reads."""
    assert dist.get_backend() == "multiring"
    assert (whole.rank(), whole.size(), whole.name()) == (here.rank, 4, "multiring")
    assert whole.group_name == dist.distributed_c10d._get_process_group_name(whole)
    assert whole.group_desc == "default_pg"
    assert repr(whole) == f"<multiring process group '0': rank {here.rank} of 4>"
    served = ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
    assert dist.distributed_c10d._device_capability(whole) == served
    assert dist.distributed_c10d._get_pg_config(whole)["backend_config"] == "cpu:multiring,cuda:multiring"
    whole.get_group_store().set("said", "so")
    assert not whole.supports_time_estimate
    whole.set_timeout(timedelta(seconds=49))
    assert whole.default_timeout_s == 49.0


def make_smaller_groups(here: Here) -> None:
    """Make groups that overlap, that only members create, and that are short-lived."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    middle = dist.new_group([1, 2])
    total = torch.full((3,), float(here.rank))
    dist.all_reduce(total, group=pairs[here.rank // 2])
    expect(total, torch.full((3,), 1.0 if here.rank < 2 else 5.0))
    if here.rank in {1, 2}:
        dist.broadcast(total, 2, group=middle)
        expect(total, torch.full((3,), 5.0))
    else:
        assert middle is dist.GroupMember.NON_GROUP_MEMBER
    for count in range(5):
        if here.rank in {0, 3}:
            passing: Any = dist.new_group([0, 3], use_local_synchronization=True)
            found = torch.full((2,), float(here.rank))
            dist.all_reduce(found, group=passing)
            expect(found, torch.full((2,), 3.0))
            dist.destroy_process_group(passing)
            with pytest.raises(ValueError, match="is not initialized in the world group map"):  # torch's own text
                dist.broadcast(found, 0, group=passing)
            with pytest.raises(DistBackendError, match="broadcast: the process group was destroyed; make it anew"):
                passing.broadcast(found, 0)
        dist.barrier(dist.new_group(timeout=timedelta(seconds=30 + count)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    found = torch.full((1,), float(here.rank))
    dist.all_reduce(found, group=mesh.get_group("outer"))
    assert found.item() == 2.0 * (here.rank % 2) + 2


def be_alone() -> None:
    """Call every collective in a group of one rank, like a mesh axis of size 1."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    source, output = torch.arange(6.0), torch.empty(6)
    for op in (dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT):
        dist.all_reduce(source, op, group=alone)
        dist.reduce_scatter_single(output.zero_(), source, op, group=alone)
        expect(output, torch.arange(6.0))
        dist.reduce_scatter(output.zero_(), [source], op, group=alone)
        expect(output, torch.arange(6.0))
    dist.all_gather_single(output.zero_(), source, group=alone)
    expect(output, torch.arange(6.0))
    dist.all_gather([output.zero_()], source, group=alone)
    expect(output, torch.arange(6.0))
    dist.all_to_all_single(output.zero_(), source, group=alone)
    expect(output, torch.arange(6.0))
    dist.all_to_all_single(output.zero_(), source, [6], [6], group=alone)
    expect(output, torch.arange(6.0))
    dist.broadcast(source, dist.get_rank(), group=alone)
    dist.reduce(source, dist.get_rank(), group=alone)
    expect(source, torch.arange(6.0))
    dist.barrier(group=alone)
    dist.destroy_process_group(alone)


def split(whole: Any, here: Here) -> None:
    """Split a group by its own method; torch's function requires an accelerator."""
    half = [0, 2] if here.rank % 2 == 0 else [1, 3]
    part = whole.split_group(half, timeout=timedelta(seconds=40), group_desc="half")
    tensor = torch.full((2,), float(here.rank))
    part.allreduce([tensor]).wait()
    expect(tensor, torch.full((2,), float(sum(half))))
    assert (part.rank(), part.size(), part.group_desc) == (here.rank // 2, 2, "half")
    assert (whole.split_group([0, 1]) is None) == (here.rank > 1)
    with pytest.raises(ValueError, match="no rank twice"):
        whole.split_group([here.rank, here.rank])
    with pytest.raises(RuntimeError, match="device type xpu"):
        whole.split_group(half, device_types=[torch.device("xpu")])


def train(here: Here) -> None:
    """Train with each option of DistributedDataParallel; compare with mean gradients."""
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        model = network(torch.float64)
        parallel = DistributedDataParallel(model, **options)  # type: ignore[arg-type]
        alone = network(torch.float64)
        for step in range(3):
            for each in (parallel, alone):
                each.zero_grad()
            # torch records a static graph in the first step, which must not use no_sync.
            with nullcontext() if "static_graph" in options else parallel.no_sync():
                backward(loss_of(parallel, 10 * step + here.rank))
            backward(loss_of(parallel, 100 + 10 * step + here.rank))
            for rank in range(4):
                backward((loss_of(alone, 10 * step + rank) + loss_of(alone, 100 + 10 * step + rank)) / 4)
            for mine, mean in zip(model.parameters(), alone.parameters(), strict=True):
                assert mine.grad is not None
                assert mean.grad is not None
                torch.testing.assert_close(mine.grad, mean.grad, rtol=1e-12, atol=1e-12)
                with torch.no_grad():
                    for parameter in (mine, mean):
                        parameter.sub_(mean.grad, alpha=0.1)


def beside_gloo(here: Here, place: str) -> None:
    """Use a multiring group beside Gloo's default group, and the other way round."""
    store = dist.FileStore(f"{place}/gloo", 4)
    dist.init_process_group("gloo", store=store, rank=here.rank, world_size=4)
    pair = dist.new_group([1, 3], backend="multiring")
    tensor = torch.full((2,), float(here.rank))
    if here.rank in {1, 3}:
        dist.all_reduce(tensor, group=pair)
        expect(tensor, torch.full((2,), 4.0))
        assert not multiring.is_initialized()  # only the group uses the job
    dist.destroy_process_group()
    enter(here, f"{place}/beside")
    gloo = dist.new_group(backend="gloo")
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=gloo)
    expect(tensor, torch.full((2,), 4.0))
    dist.destroy_process_group()


def beside_other_devices(here: Here, place: str) -> None:
    """Serve the host's tensors; pass tensors of other devices to their backend.

    Here that backend is torch's "fake", which accepts any tensor and does nothing.
    """
    store = dist.FileStore(f"{place}/devices", 4)
    dist.init_process_group("cpu:multiring,meta:fake", store=store, rank=here.rank, world_size=4)
    whole, elsewhere = dist.group.WORLD, torch.ones(8, device="meta")
    assert dist.distributed_c10d._device_capability(whole) == ["cpu", "meta"]
    tensor = torch.ones(2, device="cpu")
    dist.all_reduce(tensor)
    assert tensor.tolist() == [4.0, 4.0]
    dist.all_reduce(elsewhere)
    dist.all_gather_single(elsewhere, elsewhere[:2])
    dist.reduce_scatter_single(elsewhere[:2], elsewhere)
    with dist._coalescing_manager():
        dist.all_gather_single(elsewhere, elsewhere[:2])
        dist.all_gather_single(elsewhere, elsewhere[:2])
    dist.send(elsewhere, (here.rank + 1) % 4)
    assert whole._get_backend("meta") is whole._get_backend(torch.device("meta"))
    assert whole._get_backend("cpu") is whole
    dist.destroy_process_group()


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    run_ranks(wait_for_the_third, 2, str(tmp_path / "store"))


def wait_for_the_third(here: Here, place: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(place, 3)
    patience = timedelta(seconds=4)  # ranks 0 and 1 must come within it
    with pytest.raises((DistStoreError, RuntimeError), match="of 3 ranks, rank 2 did not come within 4 s"):
        dist.init_process_group("multiring", store=store, rank=here.rank, world_size=3, timeout=patience)
    with pytest.raises(StateError):
        multiring.rank()


# The ranks of torchrun write to one unbuffered pipe, so each line must be a single write.
SCRIPT = """
import os
import torch
import torch.distributed as dist
for options in {}, {"init_method": "multiring://"}:
    dist.init_process_group("multiring", **options)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    os.write(1, b"%d\\n" % int(tensor[0]))
try:
    dist.init_process_group("multiring", init_method="multiring://", rank=0, world_size=7)
except ValueError as error:
    os.write(1, b"refused\\n")
"""


@pytest.mark.parametrize(
    "launcher", ["torch.distributed.run --standalone --nproc-per-node=2", "multiring run -n 2 -- python"]
)
def test_launchers(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MULTIRING_")}
    environment["OMP_NUM_THREADS"] = "1"
    words = [sys.executable if word == "python" else word for word in launcher.split()]
    command = [sys.executable, "-m", *words, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)
    said = [line.rpartition(" ")[2] for line in done.stdout.splitlines()]
    assert sorted(said) == ["2"] * 4 + ["refused"] * 2, done.stderr
