"""Importing this makes `init_process_group("multiring")` known where torch's entry points are not looked up."""

from multiring_torch import register

register()
