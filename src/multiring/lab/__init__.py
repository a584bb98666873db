"""Virtual hosts with links of a chosen speed, and fault injection.

The hosts run on this machine. A lab needs root.
"""

from typing import TYPE_CHECKING, NoReturn

from multiring._former_names import refuse
from multiring.lab.control_socket import ask_lab as ask_lab
from multiring.lab.control_socket import running_labs as running_labs
from multiring.lab.faults import Fault as Fault
from multiring.lab.faults import TimedFault as TimedFault
from multiring.lab.faults import parse_fault as parse_fault
from multiring.lab.faults import parse_timed as parse_timed
from multiring.lab.job import LabOptions as LabOptions
from multiring.lab.job import run_lab as run_lab
from multiring.lab.launchers import Launcher as Launcher
from multiring.lab.machine import Lab as Lab
from multiring.lab.plan import LabPlan as LabPlan
from multiring.lab.plan import parse_rate as parse_rate
from multiring.lab.plan import parse_slots as parse_slots

if not TYPE_CHECKING:  # otherwise mypy would accept every name

    def __getattr__(name: str) -> NoReturn:
        """Raise an error with the current name if `name` is a former name."""
        refuse(__name__, name)


# what docs/lab.md offers; the rest is for other packages of multiring
__all__ = ["Fault", "Lab", "LabPlan", "parse_fault"]
