"""The agreement of a group's ranks on the order of named operations.

The agreement is a state machine without clocks or transport.
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
