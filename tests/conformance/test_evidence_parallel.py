"""Run a case of each family of benchmarks/evidence/parallel/main.py: random parallel models, compared with one process.

`make evidence` runs thousands of cases.
"""

from pathlib import Path

from benchmarks.evidence.parallel.main import TOPIC
from benchmarks.evidence.support.cases import faults_of
from tests.support.ranks import Here, Process, run_ranks

from multiring._frontend.lifecycle import size

LOADED = Process(nursery="torch", beforehand=("benchmarks.evidence.parallel.models", "tests.support.plain"))


def test_random_parallel_models_train_as_one_process(tmp_path: Path) -> None:
    for each in run_ranks(try_cases, 2, str(tmp_path), process=LOADED, deadline_s=240.0):
        assert not each["faults"]
        assert each["tried"] == len(TOPIC.families), "some families were not tried"


def try_cases(here: Here, folder: str) -> dict[str, object]:
    """Run cases of all families, the same number on each rank."""
    import torch  # noqa: PLC0415 -- in ranks alone
    import torch.distributed as dist  # noqa: PLC0415 -- the same
    from benchmarks.evidence.parallel import models  # noqa: PLC0415 -- the same
    from tests.support.plain import join  # noqa: PLC0415 -- the same

    torch.set_num_threads(1)
    join(here)
    dist.init_process_group("multiring", init_method=f"file://{folder}/store", rank=here.rank, world_size=here.size)
    assert models.joined() == here.rank
    tried, faults = 0, []
    for number, family in enumerate(TOPIC.families):
        place = Path(folder) / f"{family.name}-{number}"
        place.mkdir(exist_ok=True)
        faults += [(family.name, 7_000 + number, *fault) for fault in faults_of(family, 7_000 + number, place)]
        tried += 1
    assert size() == here.size
    dist.destroy_process_group()
    return {"faults": faults, "tried": tried}
