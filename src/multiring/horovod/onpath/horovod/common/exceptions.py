"""The errors that Horovod raises."""

from multiring._frontend.elastic.state import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from multiring._frontend.errors import HorovodInternalError as HorovodInternalError
from multiring.horovod.versions import HorovodVersionMismatchError as HorovodVersionMismatchError
from multiring.horovod.versions import get_version_mismatch_message as get_version_mismatch_message
