"""Data sets, loaders, orders and caches; no deep-learning framework is needed."""

from multiring.data.caching.blocks import BlockCache as BlockCache
from multiring.data.caching.mapped import cached as cached
from multiring.data.dataset import Dataset as Dataset
from multiring.data.dataset import Mixture as Mixture
from multiring.data.elastic_order import ElasticOrder as ElasticOrder
from multiring.data.feeding.loader import Loader as Loader
from multiring.data.feeding.loader import Workers as Workers
from multiring.data.orders import Shuffle as Shuffle
from multiring.data.readers.limits import Limits as Limits
from multiring.data.readers.storage import storage_of as storage_of
from multiring.data.shares import Share as Share
from multiring.data.shares import joined as joined
from multiring.data.shares import part_of as part_of
from multiring.data.shares import seed_for as seed_for
