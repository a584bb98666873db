"""Named operations: collectives that ranks may come to in different orders, matched by name."""
