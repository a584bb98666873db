"""The compiled core computes the same bits as its Python reference, on every instruction set of this processor."""

import hashlib
import hmac
import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from multiring import _native as native
from multiring._runtime.arrays import DTYPES, numpy_dtype
from multiring._schedule import OPS, Wire, accumulation_of, combine, decoded, encoded_bytes
from multiring._schedule.wire import encode

Array = NDArray[Any]

DEFINED = [pair for pair in itertools.product(DTYPES, OPS) if pair != ("bool", "average")]
AWKWARD = (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-40, 6e-8, 65504.0, 3.3e38, 1.0, -1.5)


def instruction_sets() -> list[str]:
    """Return the names that `force_isa` accepts, read from its error message."""
    with pytest.raises(ValueError, match="there are: ") as refused:
        native.force_isa("none")
    return str(refused.value).partition("there are: ")[2].split(", ")


@pytest.fixture(params=instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.combine_isa()
    native.force_isa(request.param)
    yield request.param
    native.force_isa(before)


def operands_of(dtype: str, count: int, how_many: int) -> list[Array]:
    """Return random operands. Float operands also contain pairs of special values."""
    random = np.random.default_rng([count, how_many, len(dtype)])
    kind = numpy_dtype(dtype)
    if kind == np.bool_:
        return [random.integers(0, 2, count).astype(kind) for _ in range(how_many)]
    if kind.kind in "iu":
        info = np.iinfo(kind)
        return [random.integers(info.min, info.max, count, kind, endpoint=True) for _ in range(how_many)]
    arrays = [random.standard_normal(count) for _ in range(how_many)]
    for array in arrays:
        special = random.random(count) < 0.3
        array[special] = random.choice(AWKWARD, special.sum())
    with np.errstate(over="ignore"):
        return [array.astype(kind) for array in arrays]


def combined(dtype: str, op: str, operands: list[Array], target: Array, divisor: int) -> None:
    native.combine(
        DTYPES[dtype],
        getattr(native.ReduceOp, "sum" if op == "average" else op),
        target.ctypes.data,
        [operand.ctypes.data for operand in operands],
        target.size,
        divisor,
    )


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(("dtype", "op"), DEFINED)
def test_combine_is_the_reference_to_the_bit(dtype: str, op: str) -> None:
    accumulation = accumulation_of(numpy_dtype(dtype), op)
    for count, how_many in itertools.product((0, 1, 3, 31, 64, 1000), (1, 2, 3, 5)):
        operands = operands_of(dtype, count, how_many)
        want = combine(operands, op, accumulation, 7, last=True)
        target = np.empty_like(operands[0])
        combined(dtype, op, operands, target, 7 if op == "average" else 1)
        assert target.tobytes() == want.tobytes(), f"{count} elements of {how_many} operands"


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_at_any_address_and_in_place(dtype: str) -> None:
    """Slices have any alignment, and the target is one of the operands. Bytes beyond the target must not change."""
    accumulation = accumulation_of(numpy_dtype(dtype), "sum")
    whole = operands_of(dtype, 300, 3)
    for start, count in ((1, 100), (7, 64), (13, 257)):
        operands = [array.copy()[start : start + count] for array in whole]
        want = combine(operands, "sum", accumulation, 3, last=False)
        frame = whole[1].copy()
        target = frame[start : start + count]
        combined(dtype, "sum", [operands[0], target, operands[2]], target, 1)
        assert target.tobytes() == want.tobytes()
        assert frame[:start].tobytes() == whole[1][:start].tobytes()
        assert frame[start + count :].tobytes() == whole[1][start + count :].tobytes()


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("wire", [Wire.FP16, Wire.BF16, Wire.INT8], ids=lambda wire: wire.name)
def test_codecs_are_the_reference_to_the_bit(wire: Wire) -> None:
    kind = native.Wire(int(wire))
    for count in (0, 1, 15, 255, 256, 257, 3000):
        random = np.random.default_rng([int(wire), count])
        everything = random.integers(0, 2**32, count, np.uint32).view(np.float32)
        for array in (*operands_of("float32", count, 1), everything, random.standard_normal(count).astype(np.float32)):
            coded = np.zeros(encoded_bytes(wire, count), np.uint8)
            native.encode(kind, coded.ctypes.data, array.ctypes.data, count)
            assert coded.tobytes() == encode(wire, array).tobytes(), f"{count} elements"
            target = np.empty_like(array)
            native.round_trip(kind, target.ctypes.data, array.ctypes.data, count)
            assert target.tobytes() == decoded(wire, array).tobytes(), f"{count} elements"


def test_wires_are_numbered_alike() -> None:
    for wire in Wire:
        assert native.Wire(int(wire)).name == wire.name
        assert [native.encoded_bytes(native.Wire(int(wire)), n) for n in (0, 1, 256, 1000)] == [
            encoded_bytes(wire, n) for n in (0, 1, 256, 1000)
        ]


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match=re.escape('no variant "mmx" on this processor; there are: ')):
        native.force_isa("mmx")


@pytest.mark.parametrize("key_bytes", [0, 1, 63, 64, 65, 200])
def test_hmac_is_pythons(key_bytes: int) -> None:
    random = np.random.default_rng(key_bytes)
    for text_bytes in (0, 1, 55, 56, 64, 119, 1000):
        key, text = random.bytes(key_bytes), random.bytes(text_bytes)
        assert native.hmac_sha256(key, text) == hmac.new(key, text, hashlib.sha256).digest()


def test_version_is_the_packages() -> None:
    from multiring._version import VERSION  # noqa: PLC0415 -- beside what it is compared with

    assert native.VERSION == VERSION
