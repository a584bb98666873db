"""srun starts ranks on several hosts with nothing set: MPI plug-ins of Slurm, kinds of jobs, folders and mistakes."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.slurm_cluster import HOME, SlurmCluster

SUM = """
import os, sys
import numpy as np, multiring
group = multiring.init()
total = np.array([10.0 ** group.rank])
group.all_reduce(total)
place = os.environ.get("SLURM_ARRAY_TASK_ID", os.environ["SLURM_STEP_ID"])
sys.stdout.write(f"{place}: {group.rank} of {group.size}, {len(group.topology.hosts)} hosts, {total[0]:.0f}\\n")
"""
SAY = ("sh", "-c", "exec python /opt/programs/sum.py")


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "shared"])
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    with SlurmCluster(shared=request.param, cpus=18) as made:
        made.program("sum.py", SUM)
        yield made


def lines(size: int, hosts: int, place: str = "0") -> list[str]:
    return [f"{place}: {rank} of {size}, {hosts} hosts, {'1' * size}" for rank in range(size)]


def said(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if " of " in line)


@pytest.mark.parametrize("mpi", ["none", "pmi2", "pmix"])
def test_every_shape_works_with_nothing_set(cluster: SlurmCluster, mpi: str) -> None:
    cluster.set_mpi(mpi)
    shapes = [(hosts, hosts * each) for hosts in (1, 2, 3) for each in (1, 2, 3)]
    shapes = shapes if mpi == "none" and not cluster.is_shared else shapes[4:5]
    # All at once: the jobs of a user must not meet each other.
    running = [cluster.user("srun", f"-N{hosts}", f"-n{size}", *SAY) for hosts, size in shapes]
    for (hosts, size), process in zip(shapes, running, strict=True):
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        assert said(output) == sorted(lines(size, hosts)), errors
    assert left_in(cluster) == []


def left_in(cluster: SlurmCluster) -> list[str]:
    """Return multiring's files in the folders of all hosts."""
    command = ("sh", "-c", f"ls -a {HOME} /tmp | grep multiring- || true")
    found = [cluster.run(*command, host=each).split() for each in range(cluster.hosts)]
    return [name for names in found for name in names if not cluster.folder.name.startswith(name)]


@pytest.fixture
def without_munge(cluster: SlurmCluster) -> Iterator[str]:
    """Return a PATH in which munge's commands are not."""
    folder = cluster.folder / "programs" / "bin"
    folder.mkdir(exist_ok=True)
    for name in ("sh", "srun", "env"):
        (folder / name).symlink_to(shutil.which(name) or name)
    yield f"/opt/programs/bin:{Path(shutil.which('python') or '').parent}"
    shutil.rmtree(folder)


@pytest.mark.parametrize("mpi", ["pmi2", "pmix"])
def test_slurms_pmi_needs_neither_munges_commands_nor_a_shared_folder(
    cluster: SlurmCluster, without_munge: str, mpi: str
) -> None:
    said_by = cluster.run("srun", f"--mpi={mpi}", "-N2", "-n3", "python", "/opt/programs/sum.py", PATH=without_munge)
    assert said(said_by) == lines(3, 2)


def test_without_any_pmi_and_munge_a_shared_folder_is_needed(cluster: SlurmCluster, without_munge: str) -> None:
    limit_s = "60" if cluster.is_shared else "8"
    command = ("srun", "--mpi=none", "-N2", "-n2", "python", "/opt/programs/sum.py")
    job = cluster.user(*command, PATH=without_munge, MULTIRING_INIT_TIMEOUT_S=limit_s)
    output, errors = job.communicate(timeout=240)
    if cluster.is_shared:
        assert said(output) == lines(2, 2), errors
        assert left_in(cluster) == []
        return
    assert job.returncode != 0
    told = next((line for line in errors.splitlines() if "LaunchError: this rank was not told" in line), errors)
    for way in ("PMI-2: srun offers none", "PMIx: srun offers none", "munge: no program", f"file: {HOME}/.multiring-"):
        assert way in told
    assert "MULTIRING_RENDEZVOUS=host:port" in told
    cluster.wait_for(lambda: left_in(cluster) == [])


def test_rank_0_also_writes_the_file_for_a_host_that_lacks_its_way(cluster: SlurmCluster, without_munge: str) -> None:
    program = f"[ $SLURM_PROCID = 1 ] && PATH={without_munge}; exec python /opt/programs/sum.py"
    limit_s = "100" if cluster.is_shared else "8"
    job = cluster.user("srun", "--mpi=none", "-N2", "-n2", "sh", "-c", program, MULTIRING_INIT_TIMEOUT_S=limit_s)
    output, errors = job.communicate(timeout=240)
    if cluster.is_shared:
        assert said(output) == lines(2, 2), errors
    else:
        assert job.returncode != 0
        assert "munge: no program munge here" in errors
    cluster.wait_for(lambda: left_in(cluster) == [])


@pytest.mark.parametrize("mpi", ["none", "pmi2", "pmix"])
@pytest.mark.parametrize("ports", ["", "7400-7440"], ids=["any port", "the same port"])
def test_a_second_program_of_a_step_and_a_second_init_work_too(cluster: SlurmCluster, mpi: str, ports: str) -> None:
    twice = SUM.replace("group = multiring.init()", "multiring.init(); multiring.shutdown(); group = multiring.init()")
    cluster.program("twice.py", twice)
    both = "python /opt/programs/twice.py && python /opt/programs/sum.py"
    more = {"MULTIRING_PORTS": ports} if ports else {}
    found = cluster.run("srun", f"--mpi={mpi}", "-N2", "-n2", "sh", "-c", both, timeout_s=120, **more)  # type: ignore[arg-type]
    assert said(found) == sorted(2 * lines(2, 2))


def test_arrays_parts_and_steps_of_a_job_are_kept_apart(cluster: SlurmCluster) -> None:
    head = "#!/bin/sh\n#SBATCH -n2 -N2\n"
    text = head + "for i in 1 2; do srun -n2 -N2 --overlap python /opt/programs/sum.py >step$i 2>&1 & done; wait"
    cluster.program("steps.sh", text)
    text = head + "srun python /opt/programs/sum.py"
    cluster.program("array.sh", text)
    text = "#!/bin/sh\n#SBATCH -n2 -N1\n#SBATCH hetjob\n#SBATCH -n3 -N2\n"
    text += "for i in 0 1; do srun --het-group=$i python /opt/programs/sum.py >part$i 2>&1 & done; wait\n"
    text += "srun --het-group=0-1 python /opt/programs/sum.py >parts 2>&1"
    cluster.program("parts.sh", text)
    jobs = [
        cluster.user("sbatch", "-W", *options)
        for options in (
            ("/opt/programs/steps.sh",),
            ("--array=7-8", "-o", "array%a", "/opt/programs/array.sh"),
            ("/opt/programs/parts.sh",),
        )
    ]
    for job in jobs:
        output, errors = job.communicate(timeout=240)
        assert job.returncode == 0, output + errors + cluster.run("sh", "-c", f"cat {HOME}/*")
    assert read(cluster, "array7") == lines(2, 2, "7")
    assert read(cluster, "array8") == lines(2, 2, "8")
    assert sorted([read(cluster, "step1")[0][0], read(cluster, "step2")[0][0]]) == ["0", "1"]
    for name in ("step1", "step2"):
        assert [line[1:] for line in read(cluster, name)] == [line[1:] for line in lines(2, 2)]
    assert [line[1:] for line in read(cluster, "part0")] == [line[1:] for line in lines(2, 1)]
    assert [line[1:] for line in read(cluster, "part1")] == [line[1:] for line in lines(3, 2)]
    assert [line[1:] for line in read(cluster, "parts")] == [line[1:] for line in lines(5, 3)]


def test_parts_of_a_job_have_no_host_in_common(cluster: SlurmCluster) -> None:
    # Parts with equal hosts would have equal names and addresses.
    cluster.program("one_host.sh", "#!/bin/sh\n#SBATCH -n1 -w host0\n#SBATCH hetjob\n#SBATCH -n1 -w host0\ntrue\n")
    job = cluster.user("sbatch", "-W", "/opt/programs/one_host.sh")
    assert "Invalid node name specified" in job.communicate(timeout=240)[1]
    assert job.returncode != 0


def read(cluster: SlurmCluster, name: str) -> list[str]:
    """Return the lines that a job has written to a file in the home of its first host."""
    texts = [
        cluster.run("sh", "-c", f"cat {HOME}/{name} 2>/dev/null || true", host=each) for each in range(cluster.hosts)
    ]
    return said(next(text for text in texts if text))


def test_rank_0_keeps_to_the_ports_it_is_given(cluster: SlurmCluster) -> None:
    listens = (
        SUM
        + """
import subprocess
group.barrier()
if group.rank == 0:
    sys.stdout.write(f"pid {os.getpid()}\\n" + subprocess.run(["ss", "-Htlnp"], capture_output=True, text=True).stdout)
group.barrier()
"""
    )
    cluster.program("listens.py", listens)
    found = cluster.run(
        "srun",
        "--mpi=none",
        "-N2",
        "-n2",
        *SAY[:2],
        "exec python /opt/programs/listens.py",
        MULTIRING_PORTS="7100-7104",
    )
    assert said(found) == lines(2, 2)
    pid = next(line.split()[1] for line in found.splitlines() if line.startswith("pid "))
    ports = [line.split()[3].rpartition(":")[2] for line in found.splitlines() if f"pid={pid}," in line]
    assert ports
    assert all(7100 <= int(port) <= 7104 for port in ports)


# -- mistakes


def test_closed_ports_are_an_error_on_every_rank(cluster: SlurmCluster) -> None:
    hold = (
        "import socket, time; s = [socket.create_server(('', p)) for p in (7200, 7201)]; "
        "print('on', flush=True); time.sleep(600)"
    )
    holders = [cluster.user("python", "-c", hold, host=each) for each in range(3)]
    try:
        for holder in holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "on\n"
        job = cluster.user("srun", "--mpi=pmi2", "-N2", "-n2", *SAY, MULTIRING_PORTS="7200-7201")
        errors = job.communicate(timeout=240)[1]
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
    assert job.returncode != 0
    # Slurm may leave out a host that still ends the last test's step, so rank 0 is on any host.
    assert errors.count("LaunchError: rank 0 cannot listen: no port of 7200-7201 is free at 10.77.0.") == 2


def test_an_address_or_a_secret_on_some_ranks_only_is_an_error(cluster: SlurmCluster) -> None:
    place = "[ $SLURM_PROCID = 0 ] && export MULTIRING_RENDEZVOUS=host0:7300 MULTIRING_SECRET=mine"
    limit_s = "20"
    started = ("srun", "--mpi=none", "-N2", "-n2", "-w", "host0", "sh", "-c")
    job = cluster.user(*started, f"{place}; exec python /opt/programs/sum.py", MULTIRING_INIT_TIMEOUT_S=limit_s)
    errors = job.communicate(timeout=240)[1]
    assert job.returncode != 0
    assert "if they are set on some ranks only, set them on all" in errors
    only_there = "[ $SLURM_PROCID = 0 ] && export MULTIRING_SECRET=mine"
    job = cluster.user(*started, f"{only_there}; exec python /opt/programs/sum.py", MULTIRING_INIT_TIMEOUT_S=limit_s)
    errors = job.communicate(timeout=240)[1]
    assert job.returncode != 0
    assert "this rank has none, but rank 0 has one; set it on all ranks, or on none" in errors


def test_an_own_secret_is_used_and_not_told(cluster: SlurmCluster) -> None:
    own = {"MULTIRING_SECRET": "of my own"}
    found = cluster.run("srun", "--mpi=pmi2", "-N2", "-n2", *SAY, **own)  # type: ignore[arg-type]
    assert said(found) == lines(2, 2)
