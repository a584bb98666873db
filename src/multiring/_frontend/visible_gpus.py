"""The number of GPUs that the ranks of this host see, by NVIDIA's management library.

The library, NVML, belongs to the driver. It counts devices without taking memory on them.
"""

import ctypes
from collections.abc import Mapping

NVML = "libnvidia-ml.so.1"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str], library: str = NVML) -> int:
    """Return the number of GPUs that a process with `environment` sees; 0 if the host has no driver of NVIDIA."""
    count = _count(library)
    names = environment.get(_VISIBLE)
    if names is None or not count:
        return count
    # CUDA ignores the first name that is not a device's, and all names after it. A part of a device (MIG) counts too.
    found = 0
    for name in map(str.strip, names.split(",")):
        is_number = name.lstrip("-").isdigit()
        if not name or (is_number and not 0 <= int(name) < count):
            break
        found += 1
    return found


def _count(library: str) -> int:
    try:
        nvml = ctypes.CDLL(library)
        initialise, count_devices, end = nvml.nvmlInit_v2, nvml.nvmlDeviceGetCount_v2, nvml.nvmlShutdown
    except (OSError, AttributeError):
        return 0
    if initialise():
        return 0
    found = ctypes.c_uint()
    try:
        return 0 if count_devices(ctypes.byref(found)) else found.value
    finally:
        end()
