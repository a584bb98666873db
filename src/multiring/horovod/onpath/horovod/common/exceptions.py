"""The errors that Horovod raises."""

from multiring.horovod.versions import HorovodVersionMismatchError as HorovodVersionMismatchError
from multiring.horovod.versions import get_version_mismatch_message as get_version_mismatch_message
from multiring.runtime.elastic import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from multiring.torch import HorovodInternalError as HorovodInternalError
