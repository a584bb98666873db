"""CPU limits from control groups, versions 1 and 2."""

from pathlib import Path

import pytest

from multiring._limits.cpu_limit import cpu_limit
from multiring._limits.rank_cores import cores_of_rank


@pytest.mark.parametrize(
    ("told", "files", "limit"),
    [
        ("0::/job\n", {"job/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/job\n", {"job/cpu.max": "max 100000\n"}, None),
        # The limit of a parent group holds, too.
        ("0::/pod/job\n", {"pod/cpu.max": "200000 100000\n", "pod/job/cpu.max": "max 100000\n"}, 2.0),
        ("0::/pod/job\n", {"pod/cpu.max": "50000 100000\n", "pod/job/cpu.max": "100000 100000\n"}, 0.5),
        # Inside a container, the path may be the host's.
        ("0::/../elsewhere/job\n", {"cpu.max": "100000 50000\n"}, 2.0),
        (
            "3:cpu,cpuacct:/host/job\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("", {}, None),
        ("0::/job\n", {"job/cpu.max": "nonsense\n"}, None),
    ],
)
def test_the_limit_is_read(tmp_path: Path, told: str, files: dict[str, str], limit: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_limit(told, tmp_path) == limit


def test_this_process_has_a_limit_or_none() -> None:
    limit = cpu_limit()
    assert limit is None or limit > 0


@pytest.mark.parametrize(
    ("own", "every", "limit", "ranks", "cores"),
    [
        (8, 8, None, 2, 4.0),  # the ranks share the cores
        (4, 8, None, 2, 4.0),  # the launcher has bound each rank to its own
        (8, 8, 3.0, 2, 1.5),  # a container's limit, which all ranks share
        (2, 8, 3.0, 1, 2.0),
        (1, 1, None, 4, 0.25),
    ],
)
def test_the_cores_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, own: int, every: int, limit: float | None, ranks: int, cores: float
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(own)))
    monkeypatch.setattr("os.cpu_count", lambda: every)
    monkeypatch.setattr("multiring._limits.rank_cores.cpu_limit", lambda: limit)
    assert cores_of_rank(ranks) == cores
