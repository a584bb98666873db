"""multiring's declarations of CUDA and NCCL, and those of the stand-ins, agree with NVIDIA's headers."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
from tests.standin.build import FLAGS, run_compiler
from tests.standin.runtime_signatures import DRIVER_MORE, DRIVER_OF_JAX, NCCL_MORE, RUNTIME_SIGNATURES, RUNTIME_TEXTS
from tests.standin.torch_build import HEADERS, SITE

from multiring._runtime.engines.cuda_driver import CUDA_SIGNATURES
from multiring._runtime.engines.nccl_library import NCCL_SIGNATURES, NCCL_TEXTS, NcclConfig, UniqueId

STRUCTURES: dict[str, type[ctypes.Structure]] = {"ncclUniqueId": UniqueId, "ncclConfig_t": NcclConfig}
# Our names of the fields that have other names in NVIDIA's header.
FIELDS = {
    "cta_cluster_size": "cgaClusterSize",
    "fewest_ctas": "minCTAs",
    "most_ctas": "maxCTAs",
    "net_name": "netName",
    "split_share": "splitShare",
}
HEAD = """
#include <cstddef>
#include <type_traits>
// 'p': a pointer; 'f': a floating-point number; 'i': an integer or an enumeration; 's': a structure.
template <typename Type> constexpr char kind() {
  if (std::is_pointer_v<Type>) return 'p';
  if (std::is_floating_point_v<Type>) return 'f';
  return std::is_integral_v<Type> || std::is_enum_v<Type> ? 'i' : 's';
}
struct Parameter { char kind; std::size_t bytes; };
template <typename Result, typename... Types, std::size_t Count>
constexpr bool has(Result (*)(Types...), Parameter result, const Parameter (&wanted)[Count]) {
  const Parameter found[] = {{kind<Types>(), sizeof(Types)}..., {0, 0}};
  if (sizeof...(Types) + 1 != Count || kind<Result>() != result.kind || sizeof(Result) != result.bytes) return false;
  for (std::size_t each = 0; each < Count; ++each)
    if (found[each].kind != wanted[each].kind || found[each].bytes != wanted[each].bytes) return false;
  return true;
}
"""


def kind_of(parameter: Any) -> str:
    """Return a parameter as the C++ code above describes it."""
    kind = "i"
    if issubclass(parameter, ctypes._Pointer) or parameter in {ctypes.c_void_p, ctypes.c_char_p}:
        kind = "p"
    elif issubclass(parameter, ctypes.Structure):
        kind = "s"
    elif parameter in {ctypes.c_float, ctypes.c_double}:
        kind = "f"
    return f"{{'{kind}', {ctypes.sizeof(parameter)}}}"


def claims(table: dict[str, list[Any]], result: Any) -> str:
    """Return the C++ statement that the header declares the functions of a table as the table does."""
    lines = []
    for name, parameters in table.items():
        wanted = ", ".join([*map(kind_of, parameters), "{0, 0}"])
        lines.append(f'static_assert(has({name}, {kind_of(result)}, {{{wanted}}}), "{name}");')
    return "\n".join(lines)


def compile_with(header: str, path: Path, text: str) -> None:
    path.write_text(f"#include <{header}>\n{HEAD}{text}", encoding="utf-8")
    run_compiler(*FLAGS, *(f"-isystem{SITE / each}" for each in HEADERS), "-fsyntax-only", str(path))


@pytest.mark.parametrize(
    ("header", "codes", "texts"),
    [
        ("cuda.h", DRIVER_MORE | DRIVER_OF_JAX | CUDA_SIGNATURES, {}),
        ("cuda_runtime_api.h", RUNTIME_SIGNATURES, RUNTIME_TEXTS),
        ("nccl.h", NCCL_SIGNATURES | NCCL_MORE, NCCL_TEXTS),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_functions(header: str, codes: dict[str, list[Any]], texts: dict[str, list[Any]], tmp_path: Path) -> None:
    assert codes
    compile_with(header, tmp_path / "right.cc", claims(codes, ctypes.c_int) + claims(texts, ctypes.c_char_p))
    name, parameters = next((name, each) for name, each in codes.items() if each)
    with pytest.raises(AssertionError, match=f"static assertion failed: {name}"):  # one parameter more
        compile_with(header, tmp_path / "wrong.cc", claims({name: [*parameters, ctypes.c_int]}, ctypes.c_int))


def test_structures(tmp_path: Path) -> None:
    lines = []
    for name, structure in STRUCTURES.items():
        for field, kind in (each[:2] for each in structure._fields_):
            theirs = FIELDS.get(field, field)
            offset = getattr(structure, field).offset
            lines.append(f'static_assert(offsetof({name}, {theirs}) == {offset}, "{name}.{field}");')
            lines.append(f'static_assert(sizeof({name}::{theirs}) == {ctypes.sizeof(kind)}, "{name}.{field}");')
    assert ctypes.sizeof(UniqueId) == 128  # the header's only field; NcclConfig is that of NCCL 2.18, which is shorter
    compile_with("nccl.h", tmp_path / "structures.cc", "\n".join(lines))
