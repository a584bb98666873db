"""Compare random programs of messages with device tensors with what was sent, on the stand-ins of CUDA.

    python benchmarks/evidence/torch/random_messages.py [--seconds 1800] [--seed 0] [--again]

The programs send and receive on torch's backend "multiring", and some of their messages are wrong;
tests/support/message_programs.py says what is random. This is random_on_devices.py with `--messages`: the options,
the record, which is build/evidence/random_messages.json, and the exit code are described there.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.evidence.torch.random_on_devices import main

if __name__ == "__main__":
    sys.exit(main(["--messages", *sys.argv[1:]]))
