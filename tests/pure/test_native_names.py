"""No two classes of the native code have the same name, so a search for a name finds one class."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
CLASS = re.compile(
    r"^[ \t]*(?:template\s*<[^;{}]*>\s*)?(?:enum\s+)?(?:class|struct|union)\s+(?:alignas\([^)]*\)\s*)?"
    r"(\w+)\s*(?:final\s*)?(?::[^;{]*)?\{",
    re.MULTILINE,
)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# The second of two variants for different compilers. It holds no other conditions.
OTHERWISE = re.compile(r"^#else\b.*?^#endif\b", re.MULTILINE | re.DOTALL)


def classes(text: str) -> list[str]:
    """Return the names of all classes and enumerations that `text` defines, nested and unnamed namespaces included."""
    return CLASS.findall(OTHERWISE.sub("", COMMENT.sub("", text)))


def test_no_class_name_is_defined_twice() -> None:
    places = defaultdict(list)
    for path in sorted(NATIVE.rglob("*")):
        if path.suffix in {".cc", ".h"}:
            for name in classes(path.read_text("utf-8")):
                places[name].append(str(path.relative_to(NATIVE)))
    assert len(places) > 150
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("struct Entry {\n  struct Key {};\n};\n", ["Entry", "Key"]),
        ("namespace {\nclass Job final : public Base<int> {\n", ["Job"]),
        ("enum class Kind : uint8_t { one, two };\nenum Old { a };\n", ["Kind"]),
        ("template <typename T, int kSize>\nstruct VectorOf {\n", ["VectorOf"]),
        ("struct alignas(64) Line\n{\n", ["Line"]),
        ("class Rail;\nstruct Error;\nenum class Fault : int;\n", []),
        ("// struct Comment {\n/* class Other {\n*/ struct Real {", ["Real"]),
        ("#ifdef A\nstruct One {};\n#else\nstruct One {};\n#endif\nstruct Two {};\n", ["One", "Two"]),
    ],
)
def test_definitions_are_found(text: str, names: list[str]) -> None:
    assert classes(text) == names
