"""The bench's libraries: their names, their environments and their start commands."""

import sys
from pathlib import Path

import pytest

from multiring._bench import install
from multiring._bench.peers import PEERS, command_of, peer_named, python_of
from multiring._bench.workers.contract import Case, write_cases
from multiring._settings import cache_folder
from multiring.errors import ArgumentError, LaunchError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for the libraries' environments."""
    monkeypatch.setenv("MULTIRING_BENCH_PEERS", str(tmp_path / "peers"))
    return tmp_path / "peers"


def pretend(folder: Path, name: str) -> Path:
    """Create the stamp file of an installed environment; return the environment's bin folder."""
    (folder / name).mkdir(parents=True)
    (folder / name / "multiring-recipe").write_text(install._stamp_of(install.RECIPES[name]))
    return folder / name / "bin"


def case_file(tmp_path: Path, **changes: object) -> Path:
    case: dict[str, object] = {"library": "x", "collective": "all_reduce", "dtype": "float32", "count": 256}
    made = Case(**{**case, "out_dir": str(tmp_path), "cores": (0, 1), **changes})  # type: ignore[arg-type]
    write_cases([made], tmp_path / "case.json")
    return tmp_path / "case.json"


def test_every_peer_has_a_worker_and_a_recipe() -> None:
    for name, peer in PEERS.items():
        assert peer.name == name
        assert peer.worker.is_file()
        assert peer.environment is None or peer.environment in install.RECIPES
    assert {"gloo", "mpich", "openmpi", "horovod"} <= set(PEERS)


def test_every_setting_has_a_reason_and_a_source() -> None:
    for peer in PEERS.values():
        assert all(knob.why and knob.source for knob in peer.knobs)


def test_no_worker_is_imported_in_place_of_its_library() -> None:
    assert not {peer.worker.stem for peer in PEERS.values()} & {"mpi4py", "horovod", "tensorflow", "torch", "numpy"}


def test_an_unknown_peer_is_told_with_the_known_ones() -> None:
    assert peer_named("mpich") is PEERS["mpich"]
    with pytest.raises(ArgumentError, match=r"unknown library 'nccl', want one of gloo, mpich, openmpi, horovod"):
        peer_named("nccl")


@pytest.mark.parametrize("name", ["mpich", "openmpi", "horovod", "mpich_window"])
def test_a_missing_peer_is_told_with_where_and_the_command(name: str, folder: Path) -> None:
    environment = PEERS[name].environment
    wanted = rf"{environment} is not installed: .*{folder}/{environment}/.*: multiring bench --install {environment}$"
    with pytest.raises(LaunchError, match=wanted):
        python_of(PEERS[name])


def test_one_made_by_another_recipe_is_not_taken(folder: Path) -> None:
    pretend(folder, "mpich")
    (folder / "mpich" / "multiring-recipe").write_text("mpich==4.0\n")
    with pytest.raises(
        LaunchError, match=r"another version than the one wanted now.*: multiring bench --install mpich$"
    ):
        python_of(PEERS["mpich"])


def test_gloo_without_torch_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert python_of(PEERS["gloo"]) == Path(sys.executable)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(LaunchError, match=r"gloo is not installed.*-m pip install torch$"):
        python_of(PEERS["gloo"])


def test_the_folder_is_the_settings_or_in_the_users_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install.folder_of("mpich") == folder / "mpich"
    monkeypatch.delenv("MULTIRING_BENCH_PEERS")
    assert install.folder_of("mpich") == cache_folder() / "peers" / "mpich"


def test_the_users_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/var/caches"}) == Path("/var/caches/multiring")
    monkeypatch.setenv("HOME", "/home/somebody")
    for environment in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "not/absolute"}):
        assert cache_folder(environment) == Path("/home/somebody/.cache/multiring")


def test_an_mpi_is_started_with_its_own_python_and_settings(folder: Path, tmp_path: Path) -> None:
    binaries, file = pretend(folder, "openmpi"), case_file(tmp_path)
    start = command_of(PEERS["openmpi"], 4, Path("worker.py"), file)
    assert start.command[:3] == (str(binaries / "mpiexec"), "-n", "4")
    assert start.command[-6:-1] == (str(binaries / "python"), "-m", "mpi4py", "worker.py", str(file))
    # With more ranks than cores, the library gets this setting, and the worker writes it into the result.
    assert start.command[-1] == "mpi_yield_when_idle=1"
    place = start.command.index("mpi_yield_when_idle")
    assert start.command[place - 1 : place + 2] == ("--mca", "mpi_yield_when_idle", "1")
    assert start.variables["OMPI_ALLOW_RUN_AS_ROOT"] == "1"


@pytest.mark.parametrize(
    ("ranks", "changes", "wanted"),
    [
        (2, {"count": 16}, {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM", "MPIR_CVAR_DEVICE_COLLECTIVES"}),
        (2, {"count": 16, "collective": "broadcast"}, set()),
        (2, {"count": 513}, set()),
        (
            3,
            {"count": 16},
            {"MPIR_CVAR_CH4_PROGRESS_THROTTLE", "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT"},
        ),
    ],
)
def test_settings_fit_the_case(
    ranks: int, changes: dict[str, object], wanted: set[str], folder: Path, tmp_path: Path
) -> None:
    pretend(folder, "mpich")
    start = command_of(PEERS["mpich"], ranks, Path("worker.py"), case_file(tmp_path, **changes))
    assert set(start.variables) - {"OMP_NUM_THREADS"} == wanted
    assert {word.partition("=")[0] for word in start.command if word.startswith("MPIR_")} == wanted


def test_horovod_is_started_by_its_own_launcher(folder: Path, tmp_path: Path) -> None:
    binaries, file = pretend(folder, "horovod"), case_file(tmp_path)
    start = command_of(PEERS["horovod"], 2, Path("worker.py"), file)
    assert start.command[:4] == (str(binaries / "horovodrun"), "--gloo", "-np", "2")
    assert "HOROVOD_CYCLE_TIME" in start.variables
    assert start.variables["PATH"].startswith(f"{binaries}:")


def test_gloos_ranks_are_started_as_multirings(tmp_path: Path) -> None:
    start = command_of(PEERS["gloo"], 2, Path("worker.py"), case_file(tmp_path))
    assert start.command[1:6] == ("-m", "multiring", "run", "-n", "2")
