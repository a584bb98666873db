"""A rank's identity from each launcher's environment. A stand-in for MPI records what is broadcast."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from multiring._foreign_variables import FOREIGN_VARIABLES
from multiring._runtime.bootstrap import addresses
from multiring._runtime.bootstrap.addresses import LocalAddress, TcpAddress, listen, own_address, parse_address
from multiring._runtime.bootstrap.identity import Identity
from multiring._runtime.bootstrap.launchers import identify
from multiring._runtime.engines import mpi_library
from multiring._settings import Settings, environment_of, foreign_environment
from multiring.errors import ArgumentError, LaunchError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "2",
    "SLURM_NNODES": "1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
}
RUN = {"MULTIRING_RANK": "0", "MULTIRING_SIZE": "3", "MULTIRING_RENDEZVOUS": "@x", "MULTIRING_SECRET": "s"}


def identity_of(environment: dict[str, str]) -> Identity:
    return identify(Settings.from_environment(environment), foreign_environment(environment))


class World:
    """COMM_WORLD of a stand-in for mpi4py. Its ranks run one after the other, starting with rank 0."""

    def __init__(self, rank: int, size: int, told: list[Any], *, is_one_host: bool = True) -> None:
        self.rank, self.size, self.told, self.is_one_host = rank, size, told, is_one_host
        self.heard = 0
        self.open_copies = 0

    def Get_rank(self) -> int:  # noqa: N802 -- MPI's spelling
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.size

    def Ibarrier(self) -> "World":  # noqa: N802
        return self

    def Test(self) -> bool:  # noqa: N802
        return True

    def Dup(self) -> "World":  # noqa: N802
        self.open_copies += 1
        return self

    def Free(self) -> None:  # noqa: N802
        self.open_copies -= 1

    def bcast(self, value: object, root: int) -> object:
        assert root == 0
        if self.rank == 0:
            self.told.append(value)
            return value
        self.heard += 1
        return self.told[self.heard - 1]

    def allreduce(self, value: object, op: str) -> bool:
        assert op == "and"
        return bool(value) and self.is_one_host


def install_mpi(monkeypatch: pytest.MonkeyPatch, world: World | None, **more: Any) -> None:
    module = ModuleType("mpi4py.MPI")
    vars(module).update(
        COMM_WORLD=world,
        LAND="and",
        Is_initialized=lambda: True,
        Is_finalized=lambda: False,
        Get_library_version=lambda: "Fake MPI 1.0, of today\nmore",
        **more,
    )
    monkeypatch.setitem(sys.modules, "mpi4py", ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)


def test_nothing_set_is_one_rank() -> None:
    identity = identity_of({"PATH": "/bin"})
    assert (identity.rank, identity.size, identity.local_rank, identity.local_size) == (0, 1, 0, 1)
    assert identity.source == "none"


def test_multiring_run_wins_over_every_other_launcher() -> None:
    identity = identity_of({**TORCHRUN, **SRUN, **HYDRA, **OPEN_MPI, **RUN})
    assert (identity.rank, identity.size, identity.rendezvous, identity.secret) == (0, 3, "@x", b"s")
    assert identity.source == "multiring"


def test_a_job_of_one_needs_no_place_to_meet() -> None:
    assert identity_of({"MULTIRING_RANK": "0", "MULTIRING_SIZE": "1"}).rendezvous == ""


def test_an_identity_does_not_show_its_secret() -> None:
    assert "hidden" not in repr(identity_of({**RUN, "MULTIRING_SECRET": "hidden"}))


def test_torchrun_on_one_host_meets_at_a_socket_named_by_the_job() -> None:
    second = identity_of(TORCHRUN)
    first = identity_of({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"})
    assert (second.rank, second.size, second.local_rank, second.local_size) == (1, 2, 1, 2)
    assert second.source == "torchrun"
    assert second.rendezvous.startswith("@")
    assert (first.rendezvous, first.job) == (second.rendezvous, second.job)


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"])
def test_another_torchrun_job_or_life_meets_elsewhere(name: str) -> None:
    assert identity_of({**TORCHRUN, name: "4"}).rendezvous != identity_of(TORCHRUN).rendezvous


def test_rank_and_world_size_alone_are_torchruns_convention() -> None:
    plain = {"RANK": "0", "WORLD_SIZE": "2", "MULTIRING_RENDEZVOUS": "h:5", "MULTIRING_SECRET": "s"}
    identity = identity_of(plain)
    assert (identity.size, identity.local_size, identity.rendezvous) == (2, None, "h:5")


def test_srun_on_one_host() -> None:
    identity = identity_of(SRUN)
    assert (identity.rank, identity.size, identity.local_rank, identity.local_size) == (2, 4, 2, 4)
    assert identity.source == "srun"
    assert identity.rendezvous != identity_of({**SRUN, "SLURM_STEP_ID": "4"}).rendezvous


def test_a_step_of_an_srun_allocation_counts_its_own_tasks_and_hosts() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "9", "SLURM_NNODES": "8"}
    assert identity_of({**SRUN, **step}).size == 3


@pytest.mark.parametrize("step", ["4294967291", "4294967290"])
def test_a_slurm_batch_script_or_interactive_shell_is_not_a_rank(step: str) -> None:
    assert identity_of({**SRUN, "SLURM_STEP_ID": step}).source == "none"


@pytest.mark.parametrize(("tasks", "warns"), [("4", True), ("1", False)])
def test_a_batch_script_that_forgets_srun_is_warned(
    caplog: pytest.LogCaptureFixture, tasks: str, *, warns: bool
) -> None:
    batch = {**SRUN, "SLURM_STEP_ID": "4294967291", "SLURM_NTASKS": tasks}
    assert identity_of(batch).size == 1
    assert ("allocation has 4 tasks: start it with srun" in caplog.text) == warns


def test_sruns_own_pmi_does_not_ask_for_mpi() -> None:
    assert identity_of({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "4", "PMIX_RANK": "2"}).source == "srun"


def test_torchrun_inside_srun_is_torchrun() -> None:
    assert identity_of({**SRUN, **TORCHRUN}).source == "torchrun"


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        (
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "1"},
            "torch's store: .* localhost:1 ",
        ),
        ({**SRUN, "SLURM_NNODES": "2"}, "PMI-2: .*PMIx: .*munge: .*file: "),
    ],
)
def test_several_hosts_need_a_way_or_a_place_and_a_secret(environment: dict[str, str], named: str) -> None:
    with pytest.raises(LaunchError, match=f"{named}.*MULTIRING_RENDEZVOUS.*MULTIRING_SECRET"):
        identity_of({**environment, "MULTIRING_INIT_TIMEOUT_S": "0.5"})
    with pytest.raises(LaunchError, match="h:5 can be reached by anyone"):
        identity_of({**environment, "MULTIRING_RENDEZVOUS": "h:5"})
    given = identity_of({**environment, "MULTIRING_RENDEZVOUS": "h:5", "MULTIRING_SECRET": "s"})
    assert (given.rendezvous, given.secret) == ("h:5", b"s")


def test_the_secret_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("from a file\n", encoding="utf-8")
    del_secret = {name: value for name, value in RUN.items() if name != "MULTIRING_SECRET"}
    assert identity_of({**del_secret, "MULTIRING_SECRET_FILE": str(path)}).secret == b"from a file"
    with pytest.raises(ArgumentError, match="both MULTIRING_SECRET and MULTIRING_SECRET_FILE"):
        identity_of({**RUN, "MULTIRING_SECRET_FILE": str(path)})
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ArgumentError, match="secret is empty"):
        identity_of({**del_secret, "MULTIRING_SECRET_FILE": str(path)})
    with pytest.raises(ArgumentError, match="No such file"):
        identity_of({**del_secret, "MULTIRING_SECRET_FILE": str(path) + "x"})


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"MULTIRING_RANK": "0"}, "MULTIRING_SIZE is not set"),
        ({"MULTIRING_LOCAL_RANK": "0"}, "MULTIRING_RANK is not set"),
        ({"MULTIRING_RANK": "2", "MULTIRING_SIZE": "2", "MULTIRING_RENDEZVOUS": "@x"}, "rank 2 of 2, want 0 to 1"),
        ({"MULTIRING_RANK": "0", "MULTIRING_SIZE": "2"}, "MULTIRING_RENDEZVOUS is not set"),
        ({**RUN, "MULTIRING_LOCAL_RANK": "5", "MULTIRING_LOCAL_SIZE": "2"}, "local rank 5 of 2"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one': want an integer >= 0"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "RANK is not set"),
        ({**SRUN, "SLURM_PROCID": "-1"}, "SLURM_PROCID='-1'"),
    ],
)
def test_half_an_identity_is_an_error(environment: dict[str, str], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        identity_of(environment)


# -- mpiexec


@pytest.fixture
def no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mpi4py", "mpi4py.MPI"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [RefuseMpi(), *sys.meta_path])


class RefuseMpi:
    def find_spec(self, name: str, *_: object) -> None:
        if name.startswith("mpi4py"):
            raise ModuleNotFoundError(name)


@pytest.mark.usefixtures("no_mpi4py")
@pytest.mark.parametrize("environment", [HYDRA, OPEN_MPI, {"PMI_RANK": "1", "PMI_SIZE": "2"}, {"PMIX_RANK": "0"}])
def test_an_mpi_launcher_without_mpi4py_is_an_error(environment: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match=r"pip install mpi4py and an MPI"):
        identity_of(environment)


@pytest.mark.usefixtures("no_mpi4py")
def test_one_rank_under_mpiexec_needs_no_mpi4py() -> None:
    assert identity_of({**HYDRA, "PMI_RANK": "0", "PMI_SIZE": "1"}).size == 1


@pytest.mark.usefixtures("no_mpi4py")
@pytest.mark.parametrize("environment", [HYDRA, OPEN_MPI])
def test_ranks_of_mpiexec_that_are_told_all_need_no_mpi4py(environment: dict[str, str]) -> None:
    found = identity_of(
        {**environment, "MULTIRING_RENDEZVOUS": "a:5000", "MULTIRING_SECRET": "s", "MULTIRING_JOB": "j"}
    )
    assert (found.rank, found.size, found.local_rank, found.local_size) == (1, 2, 1, 2)
    assert (found.rendezvous, found.secret, found.job, found.source) == ("a:5000", b"s", "j", "mpi")


@pytest.fixture
def told() -> list[Any]:
    return []


def both_ranks(monkeypatch: pytest.MonkeyPatch, told: list[Any], *, is_one_host: bool, **more: str) -> list[Identity]:
    found = []
    for rank in (0, 1):
        world = World(rank, 2, told, is_one_host=is_one_host)
        install_mpi(monkeypatch, world)
        try:
            found.append(identity_of({**HYDRA, "PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank), **more}))
        finally:
            assert world.open_copies == 0
    return found


def test_mpi_broadcasts_a_place_and_a_fresh_secret(monkeypatch: pytest.MonkeyPatch, told: list[Any]) -> None:
    first, second = both_ranks(monkeypatch, told, is_one_host=True)
    assert (first.rank, second.rank, second.size, second.local_rank, second.local_size) == (0, 1, 2, 1, 2)
    assert first.rendezvous.startswith("@")
    assert (first.rendezvous, first.secret, first.job) == (second.rendezvous, second.secret, second.job)
    again, _ = both_ranks(monkeypatch, [], is_one_host=True)
    assert len(first.secret) == 32
    assert again.secret != first.secret
    assert again.rendezvous != first.rendezvous


def test_mpi_over_several_hosts_listens_before_it_tells(monkeypatch: pytest.MonkeyPatch, told: list[Any]) -> None:
    first, second = both_ranks(monkeypatch, told, is_one_host=False, MULTIRING_INTERFACE="127.0.0.1")
    assert first.listener is not None
    try:
        assert second.listener is None
        assert second.rendezvous == f"127.0.0.1:{first.listener.getsockname()[1]}"
    finally:
        first.listener.close()


def test_mpi_keeps_to_the_ports_it_is_given(monkeypatch: pytest.MonkeyPatch, told: list[Any]) -> None:
    with listen(TcpAddress("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"no port of {port}-{port} is free at 127.0.0.1"):
            both_ranks(monkeypatch, told, is_one_host=False, MULTIRING_INTERFACE="127.0.0.1", MULTIRING_PORTS=f"{port}")
    # Rank 1 gets the error too, instead of waiting in the broadcast forever.
    install_mpi(monkeypatch, World(1, 2, told, is_one_host=False))
    with pytest.raises(LaunchError, match="rank 0 cannot listen"):
        identity_of(HYDRA)


def test_mpi_honours_a_rendezvous_that_was_set(monkeypatch: pytest.MonkeyPatch, told: list[Any]) -> None:
    _, second = both_ranks(monkeypatch, told, is_one_host=True, MULTIRING_RENDEZVOUS="[::1]:5000")
    assert second.rendezvous == "[::1]:5000"
    with pytest.raises(LaunchError, match="want host:port"):
        both_ranks(monkeypatch, [], is_one_host=True, MULTIRING_RENDEZVOUS="nowhere")


@pytest.mark.parametrize(
    ("environment", "world"), [(HYDRA, (0, 1)), (OPEN_MPI, (0, 1)), ({"PMIX_RANK": "3"}, (0, 1)), (HYDRA, (0, 2))]
)
def test_mpi4py_of_another_mpi_is_an_error(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], world: tuple[int, int]
) -> None:
    install_mpi(monkeypatch, World(*world, []))
    with pytest.raises(
        LaunchError, match=rf"but mpi4py says rank {world[0]} of {world[1]}.*'Fake MPI 1.0', which is not"
    ):
        identity_of(environment)


@pytest.mark.parametrize(
    ("state", "text"),
    [({"Is_initialized": lambda: False}, "not initialised"), ({"Is_finalized": lambda: True}, "finalized already")],
)
def test_mpi_must_be_running(monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], text: str) -> None:
    install_mpi(monkeypatch, World(1, 2, []))
    vars(sys.modules["mpi4py.MPI"]).update(state)
    with pytest.raises(LaunchError, match=text):
        identity_of(HYDRA)


def test_mpi4py_without_an_mpi_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> None:
        raise RuntimeError("cannot load MPI library")

    monkeypatch.setattr(mpi_library, "importlib", SimpleNamespace(import_module=refuse))
    with pytest.raises(LaunchError, match="cannot load MPI library"):
        identity_of(HYDRA)


# -- addresses


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("@name", LocalAddress("name")),
        ("host:80", TcpAddress("host", 80)),
        ("10.0.0.1:65535", TcpAddress("10.0.0.1", 65535)),
        ("[fe80::1]:7", TcpAddress("fe80::1", 7)),
    ],
)
def test_addresses_survive_a_round_trip(text: str, address: LocalAddress | TcpAddress) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "@", "@" + "x" * 108, "host", "host:", ":80", "host:0", "host:65536", "host:8o"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ArgumentError, match="rendezvous"):
        parse_address(text)


def test_own_address_of_an_interface() -> None:
    assert own_address("lo") == "127.0.0.1"
    assert own_address("::1") == "::1"
    with pytest.raises(LaunchError, match=r"MULTIRING_INTERFACE='none9'.*interfaces here: .*lo"):
        own_address("none9")


@pytest.fixture
def _name_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_address_by_name", lambda: "127.0.1.1")


@pytest.mark.usefixtures("_name_is_loopback")
def test_own_address_is_never_a_loopback_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_address_by_route", lambda: "10.1.2.3")
    assert own_address(None) == "10.1.2.3"

    def no_route() -> str:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(addresses, "_address_by_route", no_route)
    with pytest.raises(LaunchError, match="set MULTIRING_INTERFACE"):
        own_address(None)


def test_host_id_tells_host_names_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    here = addresses.host_id()
    assert here == addresses.host_id()
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="elsewhere"))
    assert addresses.host_id() != here


# -- the table of variables


def test_environment_of_is_read_back() -> None:
    values = {"rank": 3, "size": 4, "rendezvous": "@x", "secret": "s", "job": "j"}
    settings = Settings.from_environment(environment_of(**values))
    assert {name: getattr(settings, name) for name in values} == values


def test_foreign_environment_holds_known_names_that_say_something() -> None:
    name = next(iter(FOREIGN_VARIABLES))
    assert foreign_environment({name: "1", "RANK": "", "HOME": "/"}) == {name: "1"}
