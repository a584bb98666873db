"""The list of tests that cannot have device tensors names tests that exist, with reasons."""

import pytest
from tests.support import device_suite


def test_the_listed_tests_exist() -> None:
    listed = device_suite.host_only_tests()
    assert len(listed) > 20
    assert all(listed.values())


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ('"tests/frameworks/torch/test_torch_cells.py::test_cell"', "there is no such test"),
        ('"tests/frameworks/torch/test_torch_cell.py"', "there is no such test"),
        ('"tests/frameworks/torch/test_torch_cells.py", "tests/frameworks/torch/test_torch_cells.py"', "twice"),
    ],
)
def test_wrong_names_fail_the_run(names: str, text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    wrong = tmp_path_factory.mktemp("list") / "host_only_tests.toml"
    wrong.write_text(f'[[because]]\nwhy = "no reason"\ntests = [{names}]\n', encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_suite, "LIST", wrong)
        with pytest.raises(pytest.UsageError, match=text):
            device_suite.host_only_tests()
