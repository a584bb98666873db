"""Named operations: collectives that ranks start in any order, matched by name."""
