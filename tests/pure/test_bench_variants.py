"""Variants of multiring in a comparison: their start commands, and the allowed error of a lossy wire."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from multiring._bench.libraries import libraries
from multiring._bench.variants import VARIANTS
from multiring._bench.workers import contract
from multiring._bench.workers.contract import Case
from multiring.errors import ArgumentError, LaunchError


def lab(launcher: str) -> tuple[str, ...]:
    return ("lab", launcher, "--")


def case(out: Path, collective: str = "all_reduce", dtype: str = "float32") -> Case:
    return Case(library="multiring", collective=collective, dtype=dtype, count=1000, out_dir=str(out))


@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8"])
def test_a_wire_type_is_a_word_to_the_worker(wire: str, tmp_path: Path) -> None:
    (_, variant), _ = libraries([f"multiring-{wire}"], lab)
    start = variant.start(tmp_path / "case.json", 8)
    assert start.command[:3] == ("lab", "multiring", "--")
    assert start.command[-2:] == (str(tmp_path / "case.json"), f"wire={wire}")
    assert variant.engine == "shm+tcp"
    assert variant.refusal(case(tmp_path)) == ""
    assert "not all_gather of float32" in variant.refusal(case(tmp_path, collective="all_gather"))
    assert "not all_reduce of float64" in variant.refusal(case(tmp_path, dtype="float64"))


def test_the_mpi_engine_runs_under_that_mpis_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiring._bench.variants.installed", lambda name: tmp_path / name)
    (_, variant), _ = libraries(["multiring-mpi"], lab)
    start = variant.start(tmp_path / "case.json", 8)
    assert start.command[:3] == ("lab", "mpiexec", "--")
    assert start.variables["PATH"].startswith(f"{tmp_path / 'mpich' / 'bin'}:")
    assert start.variables["MPI4PY_LIBMPI"] == str(tmp_path / "mpich" / "lib" / "libmpi.so.12")
    told = {name: text for name, text in start.variables.items() if name.startswith("MULTIRING_")}
    assert told == {"MULTIRING_ENGINE": "mpi"}


def test_what_is_not_installed_is_said_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRING_BENCH_PEERS", str(tmp_path))
    with pytest.raises(LaunchError, match="mpich is not installed"):
        libraries(["multiring-mpi"], lab)


def test_another_kind_of_memory_takes_its_turn_on_one_host(tmp_path: Path) -> None:
    (ours, ordinary, gloo, bound), _ = libraries(["multiring-ordinary", "gloo"])
    kinds = [library.buffers("arena") for library in (ours, ordinary, gloo, bound)]
    assert kinds == ["arena", "ordinary", "ordinary", "ordinary"]
    assert (ordinary.engine, ordinary.settings(case(tmp_path), 2), ordinary.refusal(case(tmp_path))) == ("shm", {}, "")


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.is_for_hosts])
def test_one_host_has_no_wire(name: str) -> None:
    with pytest.raises(
        ArgumentError, match=f"{name} differs from multiring only between hosts: give the number of hosts"
    ):
        libraries([name])


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_int8_is_within_its_tolerance_and_a_misplaced_chunk_is_not(hosts: int, tmp_path: Path) -> None:
    ranks, asked = 2 * hosts, case(tmp_path)

    def coded(values: NDArray[np.float32]) -> NDArray[np.float32]:
        scale = np.abs(values).max() / 127
        return np.asarray(np.rint(values / scale) * scale, np.float32)

    inputs = [contract.inputs(asked, rank, ranks) for rank in range(ranks)]
    got = coded(np.sum([coded(inputs[2 * host] + inputs[2 * host + 1]) for host in range(hosts)], axis=0))
    want = contract.expected(asked, 0, ranks)
    tolerance = contract.wire_tolerance("int8", ranks)
    assert (got != want).any()
    contract.verify(asked, 0, got, want, tolerance)
    for wrong in (np.roll(got, 64), np.where(np.arange(1000) == 7, np.nan, got).astype(np.float32)):
        with pytest.raises(SystemExit, match="multiring has a wrong result"):
            contract.verify(asked, 0, wrong, want, tolerance)
    assert contract.wire_tolerance("bf16", ranks) == contract.wire_tolerance("", ranks) == 0
