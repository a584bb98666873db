"""Re-export the compiled core. All other packages import the core from here."""

from multiring._native._core import *  # noqa: F403 -- the core has public names only
