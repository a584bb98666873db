"""Whether a job of one rank does what the ranks of a larger job do to exchange gradients and counts.

A job of one rank leaves that out, because it would change nothing. `multiring profile` turns it on, so that a rank's
profile has the time that a rank spends on its hooks, its buckets and its calls, before any other rank is waited for.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class LoneRank:
    """How this process behaves in a job of one rank."""

    exchanges: bool = False


LONE_RANK = LoneRank()
