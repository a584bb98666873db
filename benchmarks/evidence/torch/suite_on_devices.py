"""Run torch's own tests of its backends with CUDA tensors on the backend "multiring", on the stand-ins of CUDA.

    python benchmarks/evidence/torch/suite_on_devices.py [--save FILE] [NAME ...]

NAME is a test of torch.testing._internal.distributed.distributed_test; by default, all of them run, with 4 ranks and 4
devices. The tests see the name "gloo". The program needs a checkout, the environment of `make test-cuda` and the
package expecttest there, which it installs beside. It takes half an hour.

Exit code 1: a test fails for another reason than the limits of the stand-ins and the refusals in LIMITS.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ROOT / "build" / "suite_on_devices"
RANKS = 4
# Words of an error -> why the test cannot pass here.
LIMITS = {
    "Could not run 'aten::batch_norm_": "the stand-ins compute on the host, which lacks the kernels of SyncBatchNorm",
    "softmax with half to float conversion is not supported on CPU": "the stand-ins compute on the host",
    "torch.OutOfMemoryError": "a device of the stand-ins has 2 GiB",
    "string pointer is null": "the stand-ins have no profiler",
    "is sparse; want a dense tensor": "the backend refuses sparse CUDA tensors",
}


def inside(names: list[str]) -> None:
    """Run the tests in this process, which has the stand-ins."""
    import torch  # noqa: PLC0415 -- torch's CUDA build, in the environment of the stand-ins only

    # Ranks are forked, so this process must not start CUDA to count devices.
    torch.cuda._device_count_nvml = lambda: RANKS  # noqa: SLF001 -- torch has no public function for it
    program = ROOT / "benchmarks" / "promises" / "torch_suite.py"
    sys.argv = [str(program), "gloo", "multiring", *names]
    runpy.run_path(str(program), run_name="__main__")


def main() -> int:
    """Run the tests and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="file for a line of JSON for each test")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    if arguments.inside:
        inside(arguments.names)
        return 0
    with_cuda, here = str(ROOT / ".ci" / "with-cuda"), str(Path(__file__).resolve())
    if not (PACKAGES / "expecttest").exists():
        install = ["pip", "install", "--quiet", "--no-deps", "--target", str(PACKAGES), "expecttest"]
        subprocess.run([with_cuda, "python", "-m", *install], check=True)  # noqa: S603
    path = f"{ROOT / 'src'}:{ROOT}:{PACKAGES}"
    program = ["python", "-m", "tests.standin", here, "--inside", *arguments.names]
    settings = {"STANDIN_DEVICES": str(RANKS), "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    environment = {**os.environ, **settings}  # noqa: TID251 -- includes the tests' variables
    command = [with_cuda, "env", f"PYTHONPATH={path}", *program]
    found = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd=ROOT) as ran:  # noqa: S603
        assert ran.stdout is not None
        for line in ran.stdout:
            if line.startswith(b'{"name"'):
                found.append(json.loads(line))
                print(f"{found[-1]['name']}: {found[-1]['how']}, {found[-1]['seconds']:.1f} s", file=sys.stderr)
    if arguments.save:
        arguments.save.write_text("".join(json.dumps(each) + "\n" for each in found), encoding="utf-8")
    failed = [each for each in found if each["how"] == "fail"]
    limits = {
        each["name"]: next((why for words, why in LIMITS.items() if words in each["why"]), None) for each in failed
    }
    for how, number in Counter(each["how"] for each in found).most_common():
        print(f"{how}: {number}")
    for why, number in Counter(filter(None, limits.values())).most_common():
        print(f"  cannot pass: {number}: {why}")
    wrong = [name for name, why in limits.items() if why is None]
    for name in wrong:
        print(f"FAILS {name}")
    return 1 if wrong or not found or ran.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
