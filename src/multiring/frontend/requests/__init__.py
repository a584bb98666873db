"""Requests of native code: frameworks' compiled operations post collectives without Python (entry/multiring.h)."""

from multiring.frontend.requests.failures import error_of as error_of
from multiring.frontend.requests.service import cancel_all as cancel_all
from multiring.frontend.requests.service import entry as entry
from multiring.frontend.requests.service import entry_address as entry_address
