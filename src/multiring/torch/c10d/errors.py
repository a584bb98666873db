"""Convert multiring's errors to torch's error classes; multiring's error becomes the cause."""

import torch.distributed as dist

from multiring.errors import ArgumentError, MultiringError


class RefusedError(RuntimeError, ValueError):
    """This rank's arguments are invalid; its inputs are unchanged. The other ranks of a collective get an error too.

    It is a RuntimeError, like the errors of torch's own backends, and also the more precise ValueError.
    """


def torch_error(what: str, error: MultiringError) -> Exception:
    """Return a RefusedError for invalid arguments, or else torch's DistBackendError (a RuntimeError).

    Args:
        what: the operation of the process group.
        error: multiring's error, the cause of the result.
    """
    kind = RefusedError if isinstance(error, ArgumentError) else dist.DistBackendError
    return kind(f"{what}: {error}")
