"""Ranks that do not come: who waits for whom, where each one is, and what is said of it."""
