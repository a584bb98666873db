"""PMIx, by the library libpmix where it is installed. It has a BSD licence.

Source: PMIx standard 4.1 (pmix.org): the structures and constants below are the same in its versions 2 to 5.
"""

import ctypes
import ctypes.util
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from multiring._exchanges.background_call import BackgroundCall
from multiring._exchanges.contract import ExchangeError, PlaceExchange

_KEY = b"multiring"
_SUCCESS = 0
# Nothing there yet: PMIX_ERR_TIMEOUT, PMIX_ERR_NOT_FOUND, PMIX_ERR_UNREACH.
_NOT_YET = (-24, -46, -25)
_STRING, _INT = 3, 6  # pmix_data_type_t
_GLOBAL = 3  # pmix_scope_t: for ranks of this host and of others
_TURN_S = 1  # the library counts whole seconds
_END_S = 3.0  # how long `close` waits for the last question, which should need a second
_ANSWER_S = 20.0  # time-out for a call that needs no other rank
_used: set[str] = set()  # the name spaces that this process has used


class _Process(ctypes.Structure):
    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    # The union of data has 24 bytes; the room after it is for versions with more.
    _fields_ = (("type", ctypes.c_uint16), ("data", ctypes.c_uint64), ("rest", ctypes.c_char * 48))


class _Information(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value))


class PmixExchange(PlaceExchange):
    """Put the text into this rank's space; the other ranks' libraries ask for it.

    Args:
        space: the value of PMIX_NAMESPACE; None if it is not set.
    """

    name = "PMIx"
    may_be_stale = True  # the nodes' servers keep rank 0's first text for all programs of the step

    def __init__(self, space: str | None) -> None:
        super().__init__()
        self._space = space
        self._library: Any = None
        self._own = _Process()
        self._asking: BackgroundCall[str | None] | None = None
        self._is_stuck = False  # whether a call has not returned
        self.waits_for = "PMIx_Get has not returned"

    def publish(self, text: str) -> bool:
        """Put the text; the library does not tell whether the others have it."""
        self._open()
        encoded = ctypes.create_string_buffer(text.encode())
        value = _Value(type=_STRING, data=ctypes.addressof(encoded))
        library = self._library
        self._check("PMIx_Put", lambda: library.PMIx_Put(ctypes.c_uint8(_GLOBAL), _KEY, ctypes.byref(value)))
        self._check("PMIx_Commit", library.PMIx_Commit)
        return False

    def fetch(self, wait_s: float) -> str | None:
        """Return the text; the library waits in whole seconds."""
        self._open()
        if self._asking is None:
            self._asking = BackgroundCall(self._ask)
        if not self._asking.is_over(wait_s):
            return None
        text, self._asking = self._asking.result(), None
        return text

    def close(self) -> None:
        """End this rank's use of PMIx; a program's own use goes on."""
        library, self._library = self._library, None
        # The library must not end while one of its calls lasts.
        if library is not None and not self._is_stuck and (self._asking is None or self._asking.is_over(_END_S)):
            with suppress(ExchangeError):
                self._check("PMIx_Finalize", lambda: library.PMIx_Finalize(None, ctypes.c_size_t(0)), library)

    def _open(self) -> None:
        if self._library is not None:
            return
        if self._space is None:
            raise ExchangeError("srun offers none (PMIX_NAMESPACE is not set; srun --mpi=pmix does)")
        if self._space in _used:
            # The servers of the other ranks' nodes keep rank 0's first text, and would return it again.
            raise ExchangeError("this process has used it already")
        library = _load()
        own = self._own
        self._check("PMIx_Init", lambda: library.PMIx_Init(ctypes.byref(own), None, ctypes.c_size_t(0)), library)
        self._library = library
        _used.add(self._space)

    def _ask(self) -> str | None:
        first = _Process(nspace=self._own.nspace, rank=0)
        limit = _Information(key=b"pmix.timeout", value=_Value(type=_INT, data=_TURN_S))
        value, library = ctypes.POINTER(_Value)(), self._library
        found = library.PMIx_Get(
            ctypes.byref(first), _KEY, ctypes.byref(limit), ctypes.c_size_t(1), ctypes.byref(value)
        )
        if found in _NOT_YET:
            self.waits_for = "rank 0 has put nothing"
            return None
        _refuse_failure("PMIx_Get", found, library)
        # The value is left to the library: to free it would need the library's own macros.
        if value.contents.type != _STRING or not value.contents.data:
            raise ExchangeError("rank 0 has put no text")
        return ctypes.string_at(value.contents.data).decode()

    def _check(self, name: str, call: Callable[[], int], library: Any = None) -> None:
        """Call the library. If it does not return in time, it is not used again."""
        running = BackgroundCall(call)
        self._is_stuck = True  # until the call is over: an interrupt may end the wait
        if not running.is_over(_ANSWER_S):
            raise ExchangeError(f"{name} does not return for {_ANSWER_S:g} s")
        self._is_stuck = False
        _refuse_failure(name, running.result(), library or self._library)


def _refuse_failure(name: str, status: int, library: Any) -> None:
    if status != _SUCCESS:
        raise ExchangeError(f"{name}: {(library.PMIx_Error_string(status) or b'').decode(errors='replace')} ({status})")


@cache
def _load() -> Any:
    # The number is of the library's binary interface: 2 since version 2 of the standard.
    names = [name for name in ("libpmix.so.2", ctypes.util.find_library("pmix")) if name is not None]
    problems = []
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
            continue
        library.PMIx_Error_string.restype = ctypes.c_char_p
        return library
    raise ExchangeError(f"libpmix cannot be loaded: {'; '.join(problems)}")
