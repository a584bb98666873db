"""The agreement of a group's ranks on the order of named operations, and of a job's ranks on who goes on.

Both are state machines without clocks or transport.
"""

from multiring._agreement.decisions import (
    AgreementOutcome,
    Deadlock,
    Decision,
    Joined,
    Lost,
    Missing,
    Note,
    Ready,
    Refused,
    Silent,
)
from multiring._agreement.member import Member
