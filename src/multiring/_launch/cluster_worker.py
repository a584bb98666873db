"""What multiring asks of a worker of a cluster (Ray, Dask, Spark): its host and versions, and a place to meet."""

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multiring._launch.cluster_ranks import WorkerFacts
from multiring._launch.local import job_name
from multiring._runtime.bootstrap.addresses import host_id, own_address
from multiring._settings import Settings, inherited_environment
from multiring._version import VERSION
from multiring.errors import LaunchError


def python_here() -> str:
    """Return this process's version of Python, such as "3.11"."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def facts_here(name: str) -> WorkerFacts:
    """Return the facts of this process; `name` is its name in the framework's words."""
    return WorkerFacts(name=name, host=host_id(), hostname=os.uname().nodename, version=VERSION, python=python_here())


def version_probe() -> Callable[[], dict[str, Any]]:
    """Return a function that a worker can call even if it has another version of multiring, or none.

    The function has no name that can be imported, so cloudpickle sends its code. It returns `hostname`, `version` (of
    multiring, or the error of its import), and `python`.
    """

    def probe() -> dict[str, Any]:
        import socket  # noqa: PLC0415 -- the function runs without this module's globals
        import sys  # noqa: PLC0415 -- as above

        try:
            from multiring import __version__ as found  # noqa: PLC0415 -- as above
        except Exception as error:  # noqa: BLE001 -- the error is the answer
            found = f"that cannot be imported ({type(error).__name__}: {error})"
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return {"hostname": socket.gethostname(), "version": found, "python": python}

    return probe


def probed(name: str, answer: dict[str, Any]) -> WorkerFacts:
    """Return the facts in an answer of `version_probe`; the host is not known."""
    return WorkerFacts(name=name, host="", **answer)


def draw_secret() -> str:
    """Return a new secret for a job."""
    return secrets.token_hex(32)


def draw_job_name(framework: str) -> str:
    """Return a new name for a job. Inside a rank of another job, that job's name becomes a prefix."""
    return job_name(Settings.from_environment().job, f"{framework}-{secrets.token_hex(8)}")


class ReservedPlace:
    """A place on rank 0's host for the ranks to meet.

    The ports stay reserved until rank 0 listens: another program's bind gets other ports, and rank 0 may still bind
    them, because both sides set SO_REUSEADDR and this object does not listen.

    Args:
        variables: the variables that the ranks get in addition to those of this process. MULTIRING_INTERFACE and
            MULTIRING_PORTS choose the address and the ports.
        is_one_host: whether all ranks are on this host. They then meet at an abstract socket.

    Raises:
        LaunchError: this host has no address that other hosts can reach, or no port is free.
    """

    def __init__(self, variables: Mapping[str, str], *, is_one_host: bool) -> None:
        settings = Settings.from_environment(inherited_environment() | dict(variables))
        self._held: list[socket.socket] = []
        try:
            self._choose(settings, is_one_host=is_one_host)
        except BaseException:
            self.release()
            raise

    def _choose(self, settings: Settings, *, is_one_host: bool) -> None:
        self.torch_address = "127.0.0.1" if is_one_host else own_address(settings.interface)
        if is_one_host:
            self.rendezvous = f"@multiring-{secrets.token_hex(8)}"
        else:
            self.rendezvous = f"{self.torch_address}:{self._reserve(settings.ports)}"
        self.torch_port = self._reserve(settings.ports)

    @property
    def told(self) -> dict[str, Any]:
        """The place as keyword arguments of `ClusterRendezvous`, without the secret and the job's name."""
        return {"rendezvous": self.rendezvous, "torch_address": self.torch_address, "torch_port": self.torch_port}

    def release(self) -> None:
        """Release the ports."""
        for held in self._held:
            held.close()
        self._held.clear()

    def _reserve(self, ports: tuple[int, int] | None) -> int:
        first, last = ports or (0, 0)
        for port in range(first, last + 1):
            sock = socket.socket(socket.AF_INET6 if ":" in self.torch_address else socket.AF_INET)
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if port not in self._ports():  # with SO_REUSEADDR a second bind of this process would succeed
                    sock.bind((self.torch_address, port))
                    self._held.append(sock)
                    return int(sock.getsockname()[1])
            sock.close()
        raise LaunchError(f"no port of {first}-{last} (MULTIRING_PORTS) is free at {self.torch_address}")

    def _ports(self) -> Sequence[int]:
        return [int(held.getsockname()[1]) for held in self._held]
