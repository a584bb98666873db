"""What a Schedule is, the proof that it does what it promises, what it costs, and what it computes."""

from multiring.schedule.arithmetic import OPS as OPS
from multiring.schedule.arithmetic import accumulation_of as accumulation_of
from multiring.schedule.arithmetic import combine as combine
from multiring.schedule.check import check as check
from multiring.schedule.check import check_moves as check_moves
from multiring.schedule.frame import Frame as Frame
from multiring.schedule.interpret import Interpretation as Interpretation
from multiring.schedule.interpret import interpret as interpret
from multiring.schedule.kinds import SUMS as SUMS
from multiring.schedule.kinds import Accumulation as Accumulation
from multiring.schedule.kinds import Collective as Collective
from multiring.schedule.kinds import Kind as Kind
from multiring.schedule.kinds import Space as Space
from multiring.schedule.layout import GRAIN as GRAIN
from multiring.schedule.layout import Counts as Counts
from multiring.schedule.layout import Extents as Extents
from multiring.schedule.layout import Splits as Splits
from multiring.schedule.model import Schedule as Schedule
from multiring.schedule.moves import NOWHERE as NOWHERE
from multiring.schedule.moves import Move as Move
from multiring.schedule.moves import Moves as Moves
from multiring.schedule.pattern import Effect as Effect
from multiring.schedule.pattern import Pattern as Pattern
from multiring.schedule.pattern import Phase as Phase
from multiring.schedule.price import price as price
