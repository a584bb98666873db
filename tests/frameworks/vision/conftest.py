"""A project with an exported model, made once for all tests of this folder."""

from pathlib import Path

import pytest
from tests.support.vision_models import make_run

from multiring.vision.exporting.runs import export_run


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with its exported model. Tests must not change it.

    The model's answers are means over eight symmetric pictures, and its head takes two resolutions.
    """
    folder = tmp_path_factory.mktemp("exported") / "pictures"
    project, run = make_run(folder, 20, levels=2, symmetries=8)
    with project:
        export_run(project, run)
        return project.runs / run
