"""A running lab: hosts, the links between them, and the application of faults."""

import os
import signal
from contextlib import ExitStack
from typing import final

from multiring.errors import StateError, UnsupportedError
from multiring.lab.faults import Fault, FaultType
from multiring.lab.host import Host
from multiring.lab.network import Network
from multiring.lab.plan import LabPlan, host_name
from multiring.lab.topology_file import topology_text


def require_root() -> None:
    """Raise UnsupportedError if this process does not run as root."""
    if os.geteuid() != 0:
        raise UnsupportedError(
            f"multiring lab makes network namespaces and needs root, this is user {os.geteuid()}: run it with sudo"
        )


@final
class Lab:
    """A context manager within which the lab runs.

    The lab also ends with the thread or process that entered it.

    Raises:
        UnsupportedError: the user is not root, or the kernel lacks a feature, which the text names.
        LaunchError: pyroute2 is not installed.
    """

    def __init__(self, plan: LabPlan) -> None:
        self.plan = plan
        self.hosts: list[Host] = []
        self._stack = ExitStack()

    def __enter__(self) -> "Lab":
        require_root()
        with ExitStack() as stack:
            hosts_file, topology = self.plan.hosts_file(), topology_text(self.plan)
            for host in range(self.plan.hosts):
                self.hosts.append(Host(host_name(host), hosts_file, topology))
                stack.callback(self.hosts[-1].close)
            for made in self.hosts:
                made.wait_until_up()
            self._network = Network(self.plan, [made.network for made in self.hosts])
            stack.callback(self._network.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def apply(self, fault: Fault) -> None:
        """Apply `fault` now.

        Raises:
            StateError: the host was killed before, or its keeper does not answer.
        """
        host = self.hosts[fault.host]
        if not host.is_alive:
            raise StateError(f"cannot {fault.kind.value} {host.name}: it was killed")
        match fault.kind:
            case FaultType.FREEZE:
                host.signal_all(signal.SIGSTOP)
            case FaultType.THAW:
                host.signal_all(signal.SIGCONT)
            case FaultType.KILL:
                host.kill()
            case FaultType.CUT | FaultType.SLOW | FaultType.MEND:
                for rail in fault.rails:
                    self._change_link(fault, rail)

    def _change_link(self, fault: Fault, rail: int) -> None:
        if fault.kind is FaultType.SLOW:
            self._network.set_rate(fault.host, rail, fault.rate)
            return
        self._network.set_link(fault.host, rail, is_up=fault.kind is FaultType.MEND)
        if fault.kind is FaultType.MEND:
            self._network.set_rate(fault.host, rail, self.plan.rails[rail])
