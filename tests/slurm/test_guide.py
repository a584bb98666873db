"""The commands of the guide for Slurm do what the page says, as they stand there, and so do those of other pages."""

import re
from collections.abc import Iterator

import pytest
from tests.support.page_blocks import BLOCK, ROOT
from tests.support.page_commands import COMMANDS, SITE, Read
from tests.support.slurm_cluster import HOME, SlurmCluster
from tests.support.slurm_training import AGAIN

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
    ran = []
    for block in blocks:
        if block["kind"] != "console":
            continue
        for command, says in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", block["text"], re.MULTILINE):
            found = cluster.run("sh", "-c", command)
            wanted = [line for line in says.splitlines() if line != "..."]
            assert all(line in found.splitlines() for line in wanted), (command, found)
            ran.append(command)
    assert len(ran) == 5
    others = {text: page for (page, text), how in COMMANDS.items() if isinstance(how, Read) and how.why == SITE}
    for command in others.keys() - {*ran}:
        cluster.run("sh", "-c", f"rm -f weights.npy; {command}")
        ran.append(command)
    assert {*ran} == others.keys()
    assert cluster.run("find", f"{HOME}/trace.json.gz", "-size", "+0")


def test_the_guides_line_for_a_dead_host_is_the_tested_one() -> None:
    assert "srun python train.py || { " + AGAIN + "; }" in PAGE
