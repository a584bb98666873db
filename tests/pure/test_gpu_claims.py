"""Pages that name GPUs say what was verified on a GPU, and what on stand-ins only."""

import ast
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
    "docs/failures.md": "what NCCL does not encrypt",
    "docs/guide_containers.md": "which build of torch to install, and what was not tested",
    "docs/guide_slurm.md": "the nodes had none",
    "docs/imagenet.md": "which build of torch to install",
    "docs/live.md": "when a number is read",
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


SOURCES = ROOT / "src" / "multiring"
_SAID = re.compile(r"[Vv]erified (on stand-ins|without GPUs) only|not tested with GPUs")
_DEVICES = re.compile(r"\bGPUs?\b|\bNCCL\b")
NO_PRINTED_CLAIM = {
    "_bench/workers/on_device.py": "why a library is not timed",
    "_bench/workers/step_worker.py": "why a library is not timed",
    "_cli/bench_step.py": "which libraries are timed",
    "_diagnosis/rules.py": "what was found on this host",
    "_frontend/errors.py": "Horovod's words for a mismatch",
    "_launch/allocations.py": "how many ranks were started; `multiring run --help` says the rest",
    "_runtime/engines/nvml.py": "names of GPUs",
    "_runtime/engines/told.py": "the beginning of an error",
    "_verify/parts.py": "what is verified now",
    "_verify/results.py": "what was verified now",
    "_verify/workers/gpu.py": "what is verified now",
    "jax/devices.py": "advice for ranks that share a GPU, which an H100 has shown",
    "planner/device_routes.py": "why NCCL is impossible",
    "torch/gradients/nccl_buckets.py": "why NCCL is impossible",
    "torch/hierarchical_path.py": "the name of a group, in errors; the module's text says it",
    "trace/chrome.py": "the name of a row; docs/timeline.md says it",
}


def printed(tree: ast.Module) -> list[str]:
    """Return the texts of a module that may be printed: its constant strings of several words.

    Docstrings and the texts of errors are left out. An error says what does not work.
    """
    left_out = set()
    for node in ast.walk(tree):
        makes_error = isinstance(node, ast.Call) and re.search(r"Error\b", ast.unparse(node.func))
        if makes_error or isinstance(node, ast.Raise | ast.Assert):
            left_out |= {id(each) for each in ast.walk(node)}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.add(id(node.value))
    constants = [each for each in ast.walk(tree) if isinstance(each, ast.Constant) and id(each) not in left_out]
    return [each.value for each in constants if isinstance(each.value, str) and " " in each.value.strip()]


def test_what_is_printed_about_devices_says_it() -> None:
    """Each module that prints about GPUs says what was not run on several; the others are listed with the reason."""
    texts = {str(path.relative_to(SOURCES)): path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py")}
    silent: set[str] = set()
    saying: set[str] = set()
    for name, text in texts.items():
        told = printed(ast.parse(text)) if _DEVICES.search(text) else []
        if any(_DEVICES.search(each) for each in told):
            (saying if any(_SAID.search(each) for each in told) else silent).add(name)
    assert silent == set(NO_PRINTED_CLAIM), sorted(silent ^ set(NO_PRINTED_CLAIM))
    assert {"_cli/device_routes.py", "_launch/rank_starts.py", "_verify/running.py"} <= saying


def test_what_was_not_run_on_several_gpus_says_it() -> None:
    for name in (
        "_runtime/engines/device_times.py",
        "_runtime/engines/nccl.py",
        "_runtime/engines/nccl_device.py",
        "_runtime/engines/nccl_communicator.py",
        "_runtime/engines/nccl_failures.py",
        "_runtime/engines/staged.py",
        "torch/hierarchical_path.py",
    ):
        assert _SAID.search(" ".join((SOURCES / name).read_text(encoding="utf-8").split())), name
