"""Load multiring's operations into TensorFlow.

They are loaded once, and connected to this process's request entry.
"""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import tensorflow as tf

from multiring._frontend.requests import entry_address
from multiring._frontend.requirements import OLDEST
from multiring.errors import UnsupportedError

_FILE = "_tensorflow.so"


def load_op_library() -> Any:
    """Return TensorFlow's module of multiring's operations.

    Raises:
        UnsupportedError: the operations do not load into this TensorFlow.
    """
    return _operations_of(os.getpid())


@cache
def _operations_of(_pid: int) -> Any:
    """Return the operations of this process. A fork that becomes a rank has its own entry for requests."""
    path, found = _loaded()
    use = ctypes.CDLL(str(path)).multiring_tensorflow_use
    use.restype, use.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)
    problem = use(entry_address()).decode()
    if problem:
        raise UnsupportedError(f"TensorFlow {tf.__version__}: {problem}; {_wanted()}")
    return found


@cache
def _loaded() -> tuple[Path, Any]:
    path = Path(__file__).parents[1] / "_native" / _FILE
    if not path.exists():
        raise UnsupportedError(f"{path} is missing: multiring was built without its operations for TensorFlow")
    try:
        return path, tf.load_op_library(str(path))
    except (tf.errors.OpError, OSError) as error:
        raise UnsupportedError(f"TensorFlow {tf.__version__} does not load {path}: {error}; {_wanted()}") from error


def _wanted() -> str:
    return f"want TensorFlow {OLDEST['tensorflow']} or newer (pip install 'multiring[tensorflow]')"
