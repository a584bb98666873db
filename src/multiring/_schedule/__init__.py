"""Schedules of collectives: build, prove, price and interpret them."""

from multiring._schedule.arithmetic import OPS, accumulation_of, combine
from multiring._schedule.check import check, check_moves
from multiring._schedule.frame import Frame
from multiring._schedule.interpret import Interpretation, interpret
from multiring._schedule.kinds import SUMS, Accumulation, Collective, Kind, Space, Wire, names_of
from multiring._schedule.layout import Counts, Extents, Splits, grain_of
from multiring._schedule.model import Schedule
from multiring._schedule.moves import NOWHERE, Move, Moves
from multiring._schedule.pattern import Effect, Pattern, Phase
from multiring._schedule.price import MOST_MESSAGES, busy_s, least, messages_of, price, timed_operation
from multiring._schedule.timing import TimedOperation, Way, ends_of
from multiring._schedule.wire import FORMATS, WIRES, decoded, encoded_bytes, wire_of
