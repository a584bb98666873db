"""Pages that name GPUs say what was verified on a GPU, and what on stand-ins only."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"\bGPUs?\b|\bCUDA\b|\bNCCL\b|`nccl`")
_TOLD = re.compile(
    r"stand-ins only|\bgpu\.md\b|verified on one GPU|\bH100\b|"
    r"GPUs of pods were not tested|Not run:[^.]*GPUs|GPUs are not supported"
)
NO_CLAIM = {
    "docs/architecture.md": "where the code is",
    "docs/chainer.md": "refusals",
    "docs/climate.md": "which build of torch to install",
    "docs/guide_containers.md": "which build of torch to install, and what was not tested",
    "docs/guide_slurm.md": "the nodes had none",
    "docs/imagenet.md": "which build of torch to install",
    "docs/mistakes.md": "what a launcher says",
    "docs/profile.md": "they are not served",
    "docs/vision_start.md": "none is needed",
}


def test_every_page_about_gpus_says_what_was_verified() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = {str(page.relative_to(ROOT)): " ".join(page.read_text(encoding="utf-8").split()) for page in pages}
    silent = {page for page, text in texts.items() if _NAMED.search(text) and not _TOLD.search(text)}
    assert silent == set(NO_CLAIM), sorted(silent ^ set(NO_CLAIM))
    assert sum(bool(_NAMED.search(text)) for text in texts.values()) > 2 * len(NO_CLAIM)


def test_what_a_command_prints_about_devices_says_it() -> None:
    """The commands that price or compare devices, and the modules that were not run on several GPUs."""
    sources = ROOT / "src" / "multiring"
    for name in (
        "_cli/device_routes.py",
        "_runtime/engines/nccl.py",
        "_runtime/engines/nccl_device.py",
        "_runtime/engines/nccl_communicator.py",
        "_runtime/engines/nccl_failures.py",
        "_runtime/engines/staged.py",
        "torch/hierarchical_path.py",
    ):
        text = " ".join((sources / name).read_text(encoding="utf-8").split())
        assert re.search(r"[Vv]erified (on stand-ins|without GPUs) only", text.replace('" "', "")), name
