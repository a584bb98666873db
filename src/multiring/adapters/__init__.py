"""The parts of an adapter for a new framework."""
