"""Virtual hosts with links of a chosen speed, and fault injection.

The hosts run on this machine. A lab needs root.
"""

from multiring._former_names import keep_to_public_names
from multiring.lab.control_socket import ask_lab, running_labs
from multiring.lab.faults import Fault, TimedFault, parse_fault, parse_timed
from multiring.lab.job import LabOptions, run_lab
from multiring.lab.launchers import Launcher
from multiring.lab.machine import Lab
from multiring.lab.plan import LabPlan, parse_paper_rate, parse_rate, parse_slots

# what docs/lab.md offers; the rest is for other packages of multiring
__all__ = ["Fault", "Lab", "LabPlan", "parse_fault"]

keep_to_public_names(__name__)
