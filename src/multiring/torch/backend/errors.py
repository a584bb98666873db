"""What fails is raised as torch's own errors, with multiring's words, chained from multiring's error."""

import torch.distributed as dist

from multiring.errors import ArgumentError, MultiringError


def torch_error(what: str, error: MultiringError) -> Exception:
    """Return the error that torch raises for the like of `error`: ValueError, or DistBackendError (a RuntimeError).

    Args:
        what: what was asked of the process group.
        error: to be its cause.
    """
    kind = ValueError if isinstance(error, ArgumentError) else dist.DistBackendError
    return kind(f"{what}: {error}")
