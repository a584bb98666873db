"""Memory limits and kills from control groups, versions 1 and 2."""

from pathlib import Path

import pytest

from multiring._launch.memory_limit import killed_for_memory, limit_bytes, memory_group


@pytest.mark.parametrize(
    ("told", "where", "files"),
    [
        ("0::/job\n", "job", {"memory.events": "low 0\noom 3\noom_kill 2\n", "memory.max": "1048576\n"}),
        # Inside a container, the path may be the host's.
        ("0::/../elsewhere/job\n", "", {"memory.events": "oom_kill 2\n", "memory.max": "1048576\n"}),
        (
            "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n",
            "memory/job",
            {"memory.oom_control": "under_oom 0\noom_kill 2\n", "memory.limit_in_bytes": "1048576\n"},
        ),
    ],
)
def test_kills_and_limit_are_read(tmp_path: Path, told: str, where: str, files: dict[str, str]) -> None:
    folder = tmp_path / where
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    group = memory_group(told, tmp_path)
    assert group == folder
    assert (killed_for_memory(group), limit_bytes(group)) == (2, 1 << 20)


def test_without_a_limit_nothing_is_said(tmp_path: Path) -> None:
    assert memory_group("", tmp_path) is None
    assert memory_group("4:memory:/job\n", tmp_path) is None
    assert (killed_for_memory(None), limit_bytes(None)) == (0, None)
    (tmp_path / "memory.events").write_text("oom_kill 0\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert (killed_for_memory(tmp_path), limit_bytes(tmp_path)) == (0, None)
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    assert limit_bytes(tmp_path) is None
