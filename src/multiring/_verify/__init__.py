"""Checks of multiring on the machine at hand, for `multiring verify`."""
