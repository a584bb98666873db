"""What fails is raised as torch's own errors, with multiring's words, chained from multiring's error."""

import torch.distributed as dist

from multiring.errors import ArgumentError, MultiringError


class RefusedError(RuntimeError, ValueError):
    """This rank's arguments are wrong; its inputs are intact. The other ranks of a collective are told, and raise.

    A RuntimeError, as torch's own backends raise it, and a ValueError, which says more.
    """


def torch_error(what: str, error: MultiringError) -> Exception:
    """Return the error that torch raises for the like of `error`: RefusedError, or DistBackendError (a RuntimeError).

    Args:
        what: what was asked of the process group.
        error: to be its cause.
    """
    kind = RefusedError if isinstance(error, ArgumentError) else dist.DistBackendError
    return kind(f"{what}: {error}")
