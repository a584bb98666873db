"""Training that continues after a failure from its last commit, as in Horovod.

    @mt.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

    train(mt.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler))

Without `multiring run --min-ranks`, all of the original ranks continue, or the job ends.
"""

from multiring._frontend.elastic.own import OwnValue, Randomness, RankChange
from multiring._frontend.elastic.running import run
from multiring._frontend.elastic.speed_shares import SpeedShares
from multiring._frontend.elastic.state import ObjectState, State
from multiring.torch.elastic.sampler import ElasticSampler
from multiring.torch.elastic.state import TorchState, get_handler_registry, set_handler_registry

__all__ = [
    "ElasticSampler",
    "ObjectState",
    "OwnValue",
    "Randomness",
    "RankChange",
    "SpeedShares",
    "State",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]
