"""Run a program with torch's CUDA build on the stand-ins: python -m tests.standin PROGRAM ARGUMENTS..."""

import runpy
import sys
from pathlib import Path

from tests.standin.torch_devices import install

install()
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
runpy.run_path(sys.argv[0], run_name="__main__")
