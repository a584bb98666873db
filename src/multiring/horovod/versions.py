"""Versions that do not fit: what Horovod raises of a framework that it was not built against. Here any will do."""

HOROVOD_VERSION = "0.28.1"  # the one whose interface this is


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return that framework `name` is at `version` where `installed_version` was built against."""
    return f"{name} is at version {version}, and horovod was built against {installed_version}"


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than the one built against; nothing here raises it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
