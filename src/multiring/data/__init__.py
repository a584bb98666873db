"""Which samples a rank trains on, and when: framework-free."""

from multiring.data.elastic_order import ElasticOrder as ElasticOrder
