"""Groups of ranks: how they compile, post and wait for collectives and messages."""
