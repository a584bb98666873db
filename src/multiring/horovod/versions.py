"""Horovod's version, and its error for a framework of another version.

multiring accepts any version of a framework.
"""

HOROVOD_VERSION = "0.28.1"  # the version of Horovod's interface that multiring has


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return a message about a framework's version that Horovod does not expect.

    The message has the version of framework `name`, and the version that Horovod was built against.
    """
    return f"{name} is at version {version}, and horovod was built against {installed_version}"


class HorovodVersionMismatchError(ImportError):
    """A framework's version is not the version that Horovod was built against.

    multiring never raises this error.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
