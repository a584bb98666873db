"""The commands of the guide for Slurm do what the page says, as they stand there."""

import re
from collections.abc import Iterator

import pytest
from tests.support.page_blocks import BLOCK, ROOT
from tests.support.slurm_cluster import HOME, SlurmCluster

pytestmark = pytest.mark.timeout(300)  # a busy machine
PAGE = (ROOT / "docs" / "guide_slurm.md").read_text("utf-8")


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(shared=True) as made:
        yield made


def test_the_guides_commands_do_what_they_say(cluster: SlurmCluster) -> None:
    blocks = list(BLOCK.finditer(PAGE))
    files = {block["file"]: block["text"] for block in blocks if block["file"]}
    assert set(files) == {"train.py", "train.sbatch"}
    for name, text in files.items():
        cluster.run("cp", cluster.program(name, text), f"{HOME}/{name}")
    commands = 0
    for block in blocks:
        if block["kind"] != "console":
            continue
        for command, says in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", block["text"], re.MULTILINE):
            found = cluster.run("sh", "-c", command)
            if says != "...\n":
                assert says in found, command
            commands += 1
    assert commands == 3
