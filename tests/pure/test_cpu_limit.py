"""CPU limits from control groups, versions 1 and 2."""

from pathlib import Path

import pytest

from multiring._launch.cpu_limit import cpu_limit


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
