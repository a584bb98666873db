"""Each public class name has one owner in `src`, so that a search for the name finds one class."""

import ast
from functools import cache
from pathlib import Path

from tests.contracts import adapters

SOURCE = Path(__file__).parents[2] / "src"
# The adapters give users the same interface in every framework, with Horovod's names.
SHARED_BY_ADAPTERS = {
    "BF16Compressor",
    "BestModelCheckpoint",
    "Compression",
    "DataLoader",
    "FP16Compressor",
    "Int8Compressor",
    "SyncBatchNormalization",
}


@cache
def owners_of_classes() -> dict[str, list[str]]:
    """Return the files that define a class, by the class's name. Names with a leading underscore do not count."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(SOURCE / "multiring")))
    return found


def test_a_class_name_has_one_owner() -> None:
    found = owners_of_classes()
    assert len(found) > 500
    several = {name: files for name, files in found.items() if len(files) > 1}
    assert not {name: files for name, files in several.items() if name not in SHARED_BY_ADAPTERS}
    assert set(several) == SHARED_BY_ADAPTERS  # an exception that is not needed is removed


def test_only_adapters_share_names() -> None:
    owners = owners_of_classes()
    rooms = {file.split("/")[0] for name in SHARED_BY_ADAPTERS for file in owners[name]}
    assert rooms <= {"_frontend", "horovod", *adapters()}
