"""Virtual hosts with links of a chosen speed, and fault injection.

The hosts run on this machine. A lab needs root.
"""

from multiring._former_names import keep_to_public_names
from multiring.lab.control_socket import ask_lab as ask_lab
from multiring.lab.control_socket import running_labs as running_labs
from multiring.lab.faults import Fault, parse_fault
from multiring.lab.faults import TimedFault as TimedFault
from multiring.lab.faults import parse_timed as parse_timed
from multiring.lab.job import LabOptions as LabOptions
from multiring.lab.job import run_lab as run_lab
from multiring.lab.launchers import Launcher as Launcher
from multiring.lab.machine import Lab
from multiring.lab.plan import LabPlan
from multiring.lab.plan import parse_rate as parse_rate
from multiring.lab.plan import parse_slots as parse_slots

# what docs/lab.md offers; the rest is for other packages of multiring
__all__ = ["Fault", "Lab", "LabPlan", "parse_fault"]

keep_to_public_names(__name__)
