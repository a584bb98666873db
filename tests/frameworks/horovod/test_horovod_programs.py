"""Programs written for Horovod run unchanged."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.support.mpi_ranks import mpi_start
from tests.support.ranks import Process
from tests.support.scripts import Start, run_script

from multiring._launch.horovod import horovod_environment, positions_on

ROOT = Path(__file__).parents[3]
# With several threads per process, a test takes minutes on busy cores.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def horovod(ranks: int, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "multiring", "run", "--horovod", "-n", str(ranks), sys.executable]
    return subprocess.run(
        [*launcher, *command],
        capture_output=True,
        text=True,
        env=ONE_THREAD | environment,
        timeout=240,
        check=False,
    )


def forked(ranks: int, script: Path, *arguments: str) -> list[str]:
    """Run a script on forked ranks with the launcher's variables; return its outputs.

    The script must succeed.
    """
    environments = tuple(horovod_environment({}, place) for place in positions_on([("localhost", ranks)]))
    process = Process(nursery="torch", beforehand=("multiring.torch", "sklearn.datasets"))
    ended = run_script(script, ranks, *arguments, process=process, start=Start(environments=environments))
    assert all(code == 0 for code, _ in ended), ended
    return [told for _, told in ended]


def written(folder: Path, program: str) -> Path:
    """Write `program`, indented text, to a script; return its path."""
    script = folder / "program.py"
    script.write_text(textwrap.dedent(program))
    return script


@pytest.mark.parametrize(
    ("options", "ranks", "least"),
    [
        (("--fp16-allreduce", "--gradient-predivide-factor", "2.0"), 2, 90.0),
        (("--use-adasum",), 3, 80.0),
        (("--epochs", "8", "--elastic"), 2, 90.0),
    ],
)
def test_digits_are_learnt(options: tuple[str, ...], ranks: int, least: float) -> None:
    told = forked(ranks, ROOT / "examples" / "digits_horovod.py", *options)[0]
    found = re.search(r"accuracy ([\d.]+)%, (\d+) ranks", told)
    assert found, told
    assert int(found[2]) == ranks
    assert float(found[1]) >= least


# One script imports every module that Horovod's own tests and users' scripts import.
IMPORTS = """
    import os
    import horovod
    import horovod.torch as hvd
    import torch
    from horovod.common import basics, elastic, exceptions, process_sets, util
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
    from horovod.common.util import env, extension_available, gloo_built, mpi_built, nccl_built, num_rank_is_power_2
    from horovod.runner import run
    from horovod.runner.common.util.env import get_env_rank_and_size
    from horovod.runner.util.threads import in_thread
    from horovod.torch.compression import Compression
    from horovod.torch.elastic import run as elastic_run
    from horovod.torch.elastic.sampler import ElasticSampler
    from horovod.torch.elastic.state import TorchState
    from horovod.torch.functions import broadcast_object
    from horovod.torch.mpi_ops import Average, Sum, allreduce, rank, size, synchronize
    from horovod.torch.optimizer import DistributedOptimizer
    from horovod.torch.sync_batch_norm import SyncBatchNorm

    assert run is horovod.run
    assert hvd.elastic.TorchState is TorchState and hvd.elastic.run is elastic_run
    assert hvd.Compression is Compression and hvd.DistributedOptimizer is DistributedOptimizer
    assert hvd.HorovodInternalError is HorovodInternalError
    assert issubclass(HorovodInternalError, RuntimeError) and HostsUpdatedInterrupt(True).skip_sync
    assert extension_available("torch") and not extension_available("mxnet")
    assert gloo_built() is hvd.gloo_built() is True and mpi_built() is nccl_built() is False
    try:
        hvd.rank()
    except ValueError as error:
        assert "Horovod has not been initialized; use hvd.init()." in str(error), error
    else:
        raise AssertionError("rank() before init()")
    hvd.init()
    hvd.init()
    assert get_env_rank_and_size() == (hvd.rank(), hvd.size()) == (rank(), size())
    assert int(os.environ["HOROVOD_LOCAL_RANK"]) == hvd.local_rank()
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1) and hvd.is_homogeneous()
    handle = hvd.allreduce_async(torch.ones(3) * (rank() + 1), name="three", op=Sum)
    assert isinstance(handle, int)
    assert synchronize(handle).tolist() == [3.0] * 3
    assert allreduce(torch.ones(2) * rank(), op=Average).tolist() == [0.5, 0.5]
    assert broadcast_object({"from": rank()}, root_rank=1) == {"from": 1}
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.allgather(torch.tensor([rank()])).tolist() == [0, 1]
    print("well")
"""


def test_modules_are_attributes_of_the_package(tmp_path: Path) -> None:
    # pytorch-ignite uses the modules as attributes, before any import by their own names.
    program = """
        import horovod.torch as hvd
        from horovod.common.util import _cache

        assert hvd.mpi_ops.allreduce is hvd.allreduce
        assert hvd.compression.Compression is hvd.Compression
        assert hvd.functions.broadcast_object is hvd.broadcast_object
        assert hvd.optimizer.DistributedOptimizer is hvd.DistributedOptimizer
        assert hvd.sync_batch_norm.SyncBatchNorm is hvd.SyncBatchNorm
        times = []
        assert [_cache(times.append)(1), len(times)] == [None, 1]
    """
    forked(1, written(tmp_path, program))


def test_what_programs_import_is_there(tmp_path: Path) -> None:
    assert forked(2, written(tmp_path, IMPORTS)) == ["well\n"] * 2


# As in an interactive session, one process runs its functions on several ranks.
INTERACTIVE = """
    import horovod
    import horovod.torch as hvd
    import torch

    def train(start, *, factor):
        hvd.init()
        return hvd.rank(), hvd.allreduce(torch.tensor([start * factor + hvd.rank()]), op=hvd.Sum).tolist()

    def fail():
        hvd.init()
        if hvd.rank() == 1:
            raise ArithmeticError("rank one is unhappy")
        hvd.allreduce(torch.ones(1))

    if __name__ == "__main__":
        assert horovod.run(train, (1.0,), {"factor": 3.0}, num_proc=2) == [(0, [7.0]), (1, [7.0])]
        try:
            horovod.run(fail, num_proc=2)
        except RuntimeError as error:
            assert isinstance(error.__cause__, ArithmeticError), error
            print("well")
"""


def test_a_function_runs_on_several_ranks(tmp_path: Path) -> None:
    done = horovod(1, str(written(tmp_path, INTERACTIVE)))
    assert done.returncode == 0, done.stderr
    assert "[0] well" in done.stdout.splitlines()


STALLING = """
    import time
    import horovod.torch as hvd
    import torch
    from horovod.common.util import env

    with env(HOROVOD_STALL_CHECK_TIME_SECONDS="1", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="2"):
        hvd.init()
    if hvd.rank() == 0:
        try:
            hvd.allreduce(torch.ones(2), name="alone")
        except hvd.HorovodInternalError as error:
            assert "alone" in str(error), error
            print("well", flush=True)
    else:
        time.sleep(5)
"""


def test_stall_times_are_horovods(tmp_path: Path) -> None:
    """The environment variables are read by init(), not at import."""
    told, _ = forked(2, written(tmp_path, STALLING))
    assert "well" in told.splitlines(), told


OPTIMIZERS = """
    import inspect
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    count = torch.nn.Parameter(torch.zeros(2, dtype=torch.long), requires_grad=False)
    optimizer = torch.optim.Adam([*model.parameters(), count], lr=0.1 * (hvd.rank() + 1))
    weights = [each.detach().clone() for each in model.parameters()]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(each.grad.shape == each.shape and not each.grad.any() for each in model.parameters())
    assert count.grad is None
    names = [*model.named_parameters(), ("count", count)]
    optimizer = hvd.DistributedOptimizer(optimizer, names, op=hvd.Sum, backward_passes_per_step=2)
    assert "horovod" in str(type(optimizer)).lower() and isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert optimizer._parameter_names[model[0].weight] == "0.weight" and len(optimizer._parameter_names) == 5
    assert (optimizer.op, optimizer.backward_passes_per_step) == (hvd.Sum, 2)
    assert optimizer.process_set is hvd.global_process_set
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    optimizer.synchronize()
    assert optimizer._handles == {}
    assert model[1].bias.grad.item() == 2 * hvd.size()
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # the state exists, so no gradient changes
    assert model[0].weight.grad is None
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    hvd.DistributedOptimizer(plain)
    assert plain._parameter_names[model[0].weight] == "allreduce.noname.0"
    print("well")
"""


def test_optimizers_have_what_programs_look_at(tmp_path: Path) -> None:
    told = forked(2, written(tmp_path, OPTIMIZERS))
    assert all("well" in each.splitlines() for each in told), told


COMMUNICATORS = """
    from mpi4py import MPI
    import horovod.torch as hvd
    import torch

    world = MPI.COMM_WORLD
    own = hvd.ProcessSet(world.Split(world.rank % 2, world.rank))
    pair = hvd.ProcessSet([0, 1])
    hvd.init(world, process_sets=[own, pair])
    want = [0, 2] if hvd.rank() % 2 == 0 else [1]
    assert own.ranks == want and own.included() and (own.rank(), own.size()) == (want.index(hvd.rank()), len(want))
    assert own.mpi_comm.size == len(want)
    assert hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, process_set=own).item() == sum(want)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2 if hvd.rank() < 2 else True
    hvd.shutdown()
    two = hvd.ProcessSet(world.Create(world.group.Incl([0, 1])))  # MPI_COMM_NULL on rank 2
    hvd.init(process_sets=[two])
    assert two.ranks == [0, 1] and two.included() is (hvd.rank() < 2)
    print("well")
"""


def test_process_sets_of_mpi_communicators(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(COMMUNICATORS))
    prefix, variables = mpi_start("mpich", 3)
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "multiring.horovod", str(script)],
        capture_output=True,
        text=True,
        env=ONE_THREAD | variables,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "".join(done.stdout.split()) == "well" * 3  # the lines of three processes may interleave


def test_a_communicator_of_another_job_is_refused(tmp_path: Path) -> None:
    program = """
        from mpi4py import MPI
        import horovod.torch as hvd

        try:
            hvd.init(process_sets=[hvd.ProcessSet(MPI.COMM_WORLD)])
        except ValueError as error:
            assert "in MPI this process is rank 0 of 1, and in the job it is rank" in str(error), error
            print("well")
    """
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    done = horovod(2, str(script), MPI4PY_LIBMPI=mpi_start("mpich", 2)[1]["MPI4PY_LIBMPI"])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] well", "[1] well"]
