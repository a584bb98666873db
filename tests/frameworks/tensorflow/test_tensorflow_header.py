"""native/tensorflow/c_api.h declares TensorFlow's C interface as TensorFlow does."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

OURS = Path(__file__).parents[3] / "native" / "tensorflow" / "c_api.h"
PROGRAM = """
#include <type_traits>
#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_status.h"
#include "tensorflow/c/tf_tensor.h"
{types}
{macro}
#define X(name, result, parameters) \\
  static_assert(std::is_same_v<decltype(&::name), result(*) parameters>, #name);
MULTIRING_TENSORFLOW_FUNCTIONS(X)
{codes}
"""


def test_declarations_are_tensorflows(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        pytest.skip("TensorFlow is not installed")
    include = Path(spec.origin).parent / "include"
    text = OURS.read_text()
    macro = text[text.index("#define MULTIRING_TENSORFLOW_FUNCTIONS") : text.index("struct TensorFlowApi {")]
    types = "\n".join(re.findall(r"^using (?:Infer|Create|Compute|Delete) = .*;$", text, re.MULTILINE))
    constants = re.findall(r"(TF_[A-Z_]+) = (\d+)", text)
    assert macro.count("X(TF_") > 30
    assert len(constants) > 5
    codes = "\n".join(f'static_assert(::{name} == {number}, "{name}");' for name, number in constants)
    source = tmp_path / "compared.cc"

    def compiled(macro: str) -> subprocess.CompletedProcess[str]:
        source.write_text(PROGRAM.format(types=types, macro=macro, codes=codes))
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-fsyntax-only", f"-I{include}", str(source)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = compiled(macro)
    assert done.returncode == 0, done.stderr[-4000:]
    wrong = compiled(macro.replace("TF_Dim, int64_t", "TF_Dim, int32_t"))
    assert "static assertion failed: TF_Dim" in wrong.stderr
