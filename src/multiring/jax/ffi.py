"""XLA's foreign function interface, by ctypes: one handler, which calls Python with the addresses of its buffers.

The structures are those of xla/ffi/api/c_api.h, version 0.x, as jaxlib ships it (`jax.ffi.include_dir()`); a test
holds them against the header. Members are only ever added behind those that are there, and every structure says its
own size. No compiler and no header is needed; a handler in C would save the tens of microseconds that this takes.
"""

import ctypes
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p, cast

import jax

from multiring.errors import ArgumentError, MismatchError, MultiringError, PeerLostError, StallError, UnsupportedError

TARGET = "multiring"
ATTRIBUTE = "call"

Execute = Callable[[str, Sequence[int], Sequence[int]], None]  # what is called, addresses of inputs and of outputs

_log = logging.getLogger("multiring")
_METADATA = 1  # the extension by which XLA asks what a handler is
_EXECUTE = 3  # the stage
_DATA_OFFSET = 24  # of a buffer's address in XLA_FFI_Buffer
_INTERNAL = 13
_CODES: dict[type[MultiringError], int] = {
    ArgumentError: 3,  # INVALID_ARGUMENT
    StallError: 4,  # DEADLINE_EXCEEDED
    MismatchError: 9,  # FAILED_PRECONDITION
    PeerLostError: 10,  # ABORTED
    UnsupportedError: 12,  # UNIMPLEMENTED
}
_KEPT = 64  # errors, to be found again

errors: deque[tuple[str, Exception]] = deque(maxlen=_KEPT)
_numbers = itertools.count(1)


class Extension(Structure):
    """XLA_FFI_Extension_Base."""


Extension._fields_ = [("struct_size", c_size_t), ("type", c_int), ("next", POINTER(Extension))]


class Version(Structure):
    """XLA_FFI_Api_Version."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", POINTER(Extension)),
        ("major_version", c_int),
        ("minor_version", c_int),
    )


class Metadata(Structure):
    """XLA_FFI_Metadata."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("api_version", Version),
        ("traits", c_uint32),
        ("state_type_id", c_int64),
    )


class MetadataExtension(Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = (("extension_base", Extension), ("metadata", POINTER(Metadata)))


class ErrorCreateArgs(Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", POINTER(Extension)),
        ("message", c_char_p),
        ("errc", c_int),
    )


class Api(Structure):
    """The beginning of XLA_FFI_Api."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", POINTER(Extension)),
        ("api_version", Version),
        ("internal_api", c_void_p),
        ("XLA_FFI_Error_Create", ctypes.CFUNCTYPE(c_void_p, POINTER(ErrorCreateArgs))),
    )


class Buffers(Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", POINTER(Extension)),
        ("size", c_int64),
        ("types", POINTER(c_int)),
        ("buffers", POINTER(c_size_t)),
    )


class ByteSpan(Structure):
    """XLA_FFI_ByteSpan."""

    _fields_ = (("ptr", c_void_p), ("len", c_size_t))


class Attributes(Structure):
    """XLA_FFI_Attrs."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", POINTER(Extension)),
        ("size", c_int64),
        ("types", POINTER(c_int)),
        ("names", POINTER(POINTER(ByteSpan))),
        ("attrs", POINTER(c_void_p)),
    )


class CallFrame(Structure):
    """XLA_FFI_CallFrame."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("extension_start", POINTER(Extension)),
        ("api", POINTER(Api)),
        ("ctx", c_void_p),
        ("stage", c_int),
        ("args", Buffers),
        ("rets", Buffers),
        ("attrs", Attributes),
        ("future", c_void_p),
    )


class Handler:
    """The handler that XLA calls, for as long as this process lives."""

    def __init__(self, execute: Execute) -> None:
        """Have `execute` called, on XLA's threads."""
        self.target = TARGET
        self._execute = execute
        # XLA keeps the address; this keeps what is there.
        self._function = ctypes.CFUNCTYPE(c_void_p, POINTER(CallFrame))(self._called)
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, (c_void_p, c_char_p, c_void_p)
        jax.ffi.register_ffi_target(TARGET, capsule(cast(self._function, c_void_p), None, None), platform="cpu")

    def _called(self, pointer: "ctypes._Pointer[CallFrame]") -> int | None:
        frame = pointer.contents
        extension = frame.extension_start
        if extension and extension.contents.type == _METADATA:
            metadata = cast(extension, POINTER(MetadataExtension)).contents.metadata.contents
            version = frame.api.contents.api_version
            metadata.api_version.major_version = version.major_version
            metadata.api_version.minor_version = version.minor_version
            metadata.traits = 0
            return None
        if frame.stage != _EXECUTE:
            return None
        try:
            span = cast(frame.attrs.attrs[0], POINTER(ByteSpan)).contents
            text = ctypes.string_at(span.ptr, span.len).decode()
            self._execute(text, _addresses(frame.args), _addresses(frame.rets))
        except BaseException as error:  # noqa: BLE001 -- nothing may leave through C
            return _refused(frame, error)
        return None


def _addresses(buffers: Buffers) -> list[int]:
    return [
        c_size_t.from_address(at + _DATA_OFFSET).value
        for at in cast(buffers.buffers, POINTER(c_size_t))[: buffers.size]
    ]


def _refused(frame: CallFrame, error: BaseException) -> int | None:
    """Return XLA's error for `error`, with a number by which `error_of` finds it again."""
    number = f"[multiring error {next(_numbers)}]"
    if isinstance(error, Exception):
        errors.append((number, error))
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), _INTERNAL)
    text = f"{type(error).__name__}: {error} {number}".encode()
    made = ErrorCreateArgs(ctypes.sizeof(ErrorCreateArgs), None, text, code)
    found: int | None = frame.api.contents.XLA_FFI_Error_Create(byref(made))
    return found


def error_of(exception: BaseException) -> Exception | None:
    """Return the error of multiring's that JAX raised as `exception`; None where it is no such one, or long ago."""
    text = str(exception)
    return next((error for number, error in errors if number in text), None)
