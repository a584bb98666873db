"""The agreement of a group's ranks on the order of named operations.

The agreement is a state machine without clocks or transport.
"""

from multiring.agreement.decisions import AgreementOutcome as AgreementOutcome
from multiring.agreement.decisions import Deadlock as Deadlock
from multiring.agreement.decisions import Decision as Decision
from multiring.agreement.decisions import Joined as Joined
from multiring.agreement.decisions import Lost as Lost
from multiring.agreement.decisions import Missing as Missing
from multiring.agreement.decisions import Note as Note
from multiring.agreement.decisions import Ready as Ready
from multiring.agreement.decisions import Refused as Refused
from multiring.agreement.decisions import Silent as Silent
from multiring.agreement.member import Member as Member
