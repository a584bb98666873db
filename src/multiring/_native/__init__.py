"""The compiled core, re-exported: everything outside this room imports it from here."""

from multiring._native._core import MOST_LANES as MOST_LANES
from multiring._native._core import NOTE_BYTES as NOTE_BYTES
from multiring._native._core import VERSION as VERSION
from multiring._native._core import Context as Context
from multiring._native._core import DType as DType
from multiring._native._core import Exchange as Exchange
from multiring._native._core import FaultKind as FaultKind
from multiring._native._core import Holdings as Holdings
from multiring._native._core import Lowering as Lowering
from multiring._native._core import Operation as Operation
from multiring._native._core import OperationSpec as OperationSpec
from multiring._native._core import Program as Program
from multiring._native._core import ReduceOp as ReduceOp
from multiring._native._core import Repeats as Repeats
from multiring._native._core import Rounds as Rounds
from multiring._native._core import Wire as Wire
from multiring._native._core import combine as combine
from multiring._native._core import combine_isa as combine_isa
from multiring._native._core import encode as encode
from multiring._native._core import encoded_bytes as encoded_bytes
from multiring._native._core import end_without_mpi as end_without_mpi
from multiring._native._core import force_isa as force_isa
from multiring._native._core import hmac_sha256 as hmac_sha256
from multiring._native._core import make_program as make_program
from multiring._native._core import round_trip as round_trip
from multiring._native._core import view as view
