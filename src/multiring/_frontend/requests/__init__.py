"""Requests of native code: frameworks' compiled operations post collectives without Python (entry/multiring.h)."""

from multiring._frontend.requests.failures import error_of
from multiring._frontend.requests.service import cancel_all, entry, entry_address
