"""Training that goes on from the last commit after a failure."""

from multiring.runtime.elastic import HostUpdateResult as HostUpdateResult
from multiring.runtime.elastic import ObjectState as ObjectState
from multiring.runtime.elastic import State as State
from multiring.runtime.elastic import run_fn as run_fn
