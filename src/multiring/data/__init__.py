"""Data sets, loaders, orders and caches; no deep-learning framework is needed."""

from typing import TYPE_CHECKING, NoReturn

from multiring.data.caching.blocks import BlockCache as BlockCache
from multiring.data.caching.mapped import cached as cached
from multiring.data.dataset import Dataset as Dataset
from multiring.data.dataset import Mixture as Mixture
from multiring.data.elastic_order import ElasticOrder as ElasticOrder
from multiring.data.feeding.loader import Loader as Loader
from multiring.data.feeding.loader import Workers as Workers
from multiring.data.orders import Shuffle as Shuffle
from multiring.data.readers.limits import Limits as Limits
from multiring.data.readers.storage import open_storage as open_storage
from multiring.data.shares import Share as Share
from multiring.data.shares import merge_batches as merge_batches
from multiring.data.shares import seed_for as seed_for
from multiring.data.shares import shard_batch as shard_batch

__all__ = [
    "BlockCache",
    "Dataset",
    "ElasticOrder",
    "Limits",
    "Loader",
    "Mixture",
    "Share",
    "Shuffle",
    "Workers",
    "cached",
    "merge_batches",
    "open_storage",
    "seed_for",
    "shard_batch",
]
from multiring._former_names import refuse

if not TYPE_CHECKING:  # otherwise mypy would accept every name

    def __getattr__(name: str) -> NoReturn:
        """Raise an error with the current name if `name` is a former name."""
        refuse(__name__, name)
