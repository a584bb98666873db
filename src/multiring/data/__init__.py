"""Data sets, loaders, orders and caches; no deep-learning framework is needed."""

from multiring._former_names import keep_to_public_names
from multiring.data.array_dataset import ArrayDataset
from multiring.data.caching.blocks import BlockCache
from multiring.data.caching.mapped import cached
from multiring.data.dataset import Dataset, Mixture, Samples
from multiring.data.elastic_order import ElasticOrder
from multiring.data.feeding.loader import Loader, Workers
from multiring.data.orders import Shuffle
from multiring.data.readers.limits import Limits
from multiring.data.readers.storage import open_storage
from multiring.data.shares import Share, merge_batches, seed_for, shard_batch

__all__ = [
    "ArrayDataset",
    "BlockCache",
    "Dataset",
    "ElasticOrder",
    "Limits",
    "Loader",
    "Mixture",
    "Samples",
    "Share",
    "Shuffle",
    "Workers",
    "cached",
    "merge_batches",
    "open_storage",
    "seed_for",
    "shard_batch",
]

keep_to_public_names(__name__)
