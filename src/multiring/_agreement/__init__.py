"""The agreement of a group's ranks on the order of named operations.

The agreement is a state machine without clocks or transport.
"""

from multiring._agreement.decisions import AgreementOutcome as AgreementOutcome
from multiring._agreement.decisions import Deadlock as Deadlock
from multiring._agreement.decisions import Decision as Decision
from multiring._agreement.decisions import Joined as Joined
from multiring._agreement.decisions import Lost as Lost
from multiring._agreement.decisions import Missing as Missing
from multiring._agreement.decisions import Note as Note
from multiring._agreement.decisions import Ready as Ready
from multiring._agreement.decisions import Refused as Refused
from multiring._agreement.decisions import Silent as Silent
from multiring._agreement.member import Member as Member
