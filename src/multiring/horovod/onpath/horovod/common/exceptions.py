"""The errors that Horovod raises."""

from multiring._frontend.elastic.state import HostsUpdatedInterrupt
from multiring._frontend.errors import HorovodInternalError
from multiring.horovod.versions import HorovodVersionMismatchError, get_version_mismatch_message
