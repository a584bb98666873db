"""Named operations: collectives that ranks may start in different orders, matched by name."""
