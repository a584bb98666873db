"""Foresee what schedules and training steps take on clusters that need not exist."""

from multiring._simulator.events import seconds_of_all, seconds_of_ranks
