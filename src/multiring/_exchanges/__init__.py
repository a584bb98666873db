"""Tell the ranks of another launcher where to meet, and a fresh secret, by its own means."""

from multiring._exchanges.contract import ExchangeError, PlaceExchange
from multiring._exchanges.publishing import Publication, fetch, publish
from multiring._exchanges.slurm import SlurmStep, ways_of_step
from multiring._exchanges.torch_store import TorchStoreExchange

__all__ = [
    "ExchangeError",
    "PlaceExchange",
    "Publication",
    "SlurmStep",
    "TorchStoreExchange",
    "fetch",
    "publish",
    "ways_of_step",
]
