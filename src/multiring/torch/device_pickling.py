"""Pickled CUDA tensors arrive on the receiving rank's own device.

torch restores a tensor on the device of the same number. On another rank this number belongs to another rank's device,
or to none.
"""

import io
from typing import Any

import torch

from multiring._frontend.object_collectives import add_reducer


def reduce_storage(value: Any) -> Any:
    """Return the reduced form of a storage on a CUDA device; NotImplemented for any other value."""
    if not isinstance(value, torch.storage.TypedStorage):
        return NotImplemented
    if value._untyped_storage.device.type != "cuda":  # noqa: SLF001 -- each public way warns that the type is deprecated
        return NotImplemented
    saved = io.BytesIO()
    torch.save(value, saved, _use_new_zipfile_serialization=False)
    return _restored, (saved.getvalue(),)


def _restored(saved: bytes) -> Any:
    here = torch.device("cuda", torch.cuda.current_device())
    # The bytes come from a rank of the job; multiring._frontend.object_collectives says why they are trusted.
    return torch.load(io.BytesIO(saved), map_location=here, weights_only=False)


add_reducer(reduce_storage)
