"""The hosts and ranks of an allocation, from the variables of its scheduler."""

from pathlib import Path

import pytest

from multiring._cli import main
from multiring._launch.allocations import (
    SlurmAllocation,
    _cpus_of,
    default_ranks,
    listed_hosts,
    slurm_allocation,
    spread,
)
from multiring._launch.job import JobOptions
from multiring.errors import ArgumentError

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_TASKS_PER_NODE": "2(x2),1"}


def test_newcomers_have_no_part_in_the_number_of_ranks_at_the_start_but_limit_it() -> None:
    allocation = SlurmAllocation("7", (4, 1, 1))
    for most, counts in ((None, [4, 1, 1]), (6, [4, 1, 1]), (8, [4, 1, 1]), (4, [2, 1, 1])):
        assert allocation.counts(None, JobOptions(min_ranks=2, max_ranks=most)) == counts
    assert allocation.counts(3, JobOptions(min_ranks=2, max_ranks=6)) == [1, 1, 1]


def test_slurms_batch_script_has_its_allocation_and_a_step_has_none() -> None:
    assert slurm_allocation(SLURM) == SlurmAllocation("7", (2, 2, 1))
    assert slurm_allocation({**SLURM, "SLURM_STEP_ID": str(0xFFFFFFFB)}) == SlurmAllocation("7", (2, 2, 1))
    assert slurm_allocation({**SLURM, "SLURM_STEP_ID": "0"}) is None
    assert slurm_allocation({}) is None
    alone = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    assert slurm_allocation(alone) == SlurmAllocation("7", (1, 1))


@pytest.mark.parametrize(("told", "words"), [("2(x3", "want numbers like"), ("2(x2)", "is for 2 nodes")])
def test_contradictions_are_errors(told: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        slurm_allocation({**SLURM, "SLURM_TASKS_PER_NODE": told})


def test_a_heterogeneous_job_is_refused_and_its_steps_are_not() -> None:
    parts = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"}  # salloc's variables: those of nodes have a component's number
    for environment in (parts, {**SLURM, **parts}):
        with pytest.raises(ArgumentError, match=r"job 7 is heterogeneous.*srun --het-group=0-1 python"):
            slurm_allocation(environment)
    assert slurm_allocation({**SLURM, **parts, "SLURM_STEP_ID": "0"}) is None


def test_ranks_are_spread_evenly() -> None:
    assert spread(7, 3) == [3, 2, 2]
    assert spread(3, 3) == [1, 1, 1]
    with pytest.raises(ArgumentError, match="want -n 3 or more, or --here"):
        spread(2, 3)


def test_hosts_of_pbs_and_lsf(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("a\na\nb\n", encoding="utf-8")
    assert listed_hosts({"PBS_NODEFILE": str(file)}) == "a:2,b:1"
    assert listed_hosts({"LSB_DJOB_HOSTFILE": str(file), "LSB_MCPU_HOSTS": "c 4"}) == "a:2,b:1"
    assert listed_hosts({"LSB_MCPU_HOSTS": "a 4 b 2"}) == "a:4,b:2"
    assert listed_hosts({}) is None
    with pytest.raises(ArgumentError, match="want names and numbers"):
        listed_hosts({"LSB_MCPU_HOSTS": "a 4 b"})
    with pytest.raises(ArgumentError, match="PBS_NODEFILE"):
        listed_hosts({"PBS_NODEFILE": str(tmp_path / "none")})


def test_without_a_number_there_is_a_rank_for_each_gpu_or_numa_node() -> None:
    assert default_ranks(3)[0] == 3
    ranks, why = default_ranks(0)
    assert ranks >= 1
    assert "NUMA" in why
    assert _cpus_of("0-2,7") == {0, 1, 2, 7}
    assert _cpus_of("") == set()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nodes", "2", "--node-rank", "0", "x"], "--meet is missing"),
        (["--nodes", "2", "--node-rank", "0", "--meet", "a:1", "--here", "x"], "--nodes goes with neither"),
        (["--here", "--hosts", "a:2", "x"], "--here uses this host only"),
    ],
)
def test_options_that_contradict_each_other(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", *words])
    assert stop.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--node-rank", "2", "--meet", "a:1"], "want a number of nodes, and a node from 0"),
        (["--node-rank", "0", "--meet", "@a"], "want HOST:PORT"),
        (["--node-rank", "0", "--meet", "localhost:2"], "--nodes needs a secret that all nodes share"),
    ],
)
def test_places_that_cannot_be(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MULTIRING_SECRET", raising=False)
    monkeypatch.delenv("MULTIRING_SECRET_FILE", raising=False)
    assert main(["run", "--nodes", "2", *words, "-n", "1", "sh"]) == 2
    assert told in capsys.readouterr().err
