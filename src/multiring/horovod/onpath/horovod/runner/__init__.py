"""Run a function on several ranks."""

from multiring.horovod import run
