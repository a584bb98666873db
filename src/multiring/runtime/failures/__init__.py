"""Detection of ranks that do not arrive: their status, circles of waiting ranks, warnings and errors."""
