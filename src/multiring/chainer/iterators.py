"""ChainerMN's iterators, which work with any communicator."""

from chainermn.iterators import create_multi_node_iterator, create_synchronized_iterator

__all__ = ["create_multi_node_iterator", "create_synchronized_iterator"]
