"""Requests of native code: frameworks' compiled operations post collectives without Python (entry/multiring.h)."""

from multiring._frontend.requests.failures import error_of as error_of
from multiring._frontend.requests.service import cancel_all as cancel_all
from multiring._frontend.requests.service import entry as entry
from multiring._frontend.requests.service import entry_address as entry_address
