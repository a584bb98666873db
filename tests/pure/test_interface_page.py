"""docs/interface.md is the table of the adapters' public functions, and its gaps are few and explained."""

import ast

from tests.support import interface_page as made


def test_the_page_is_what_the_code_says() -> None:
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "run python tests/support/interface_page.py"


def test_gaps_are_what_a_framework_lacks_and_few() -> None:
    cells = {(row, adapter) for row in made.rows() for adapter in made.TITLES}
    assert made.LACKS.keys() | made.OTHER.keys() <= cells
    assert len(made.LACKS) <= len(cells) / 10


def test_other_names_exist() -> None:
    communicator = ast.parse((made.SOURCE / "chainer" / "communicator.py").read_text(encoding="utf-8"))
    methods = {f"comm.{each.name}" for each in ast.walk(communicator) if isinstance(each, ast.FunctionDef)}
    for (row, adapter), name in made.OTHER.items():
        assert row not in made.exported(adapter), f"{adapter} has {row} itself"
        assert name in made.exported(adapter) | methods | made.FRAMEWORKS_OWN, f"{adapter} has no {name}"


def test_every_adapter_lists_each_name_once_and_hides_horovods_builds() -> None:
    for adapter in made.TITLES:
        names = ast.literal_eval(made._assigned(adapter))
        assert len(names) == len(set(names))
        assert not [name for name in names if name.endswith(("_built", "_enabled"))]
