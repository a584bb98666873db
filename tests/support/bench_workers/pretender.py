"""A bench worker without a library: the name of its case selects its behaviour."""

import subprocess
import sys
import time
from typing import TYPE_CHECKING

from multiring._settings import Settings

if TYPE_CHECKING:
    from multiring._bench.workers import contract
else:
    sys.path.insert(0, __import__("multiring._bench.workers", fromlist=["x"]).__path__[0])
    import contract


def main(case: contract.Case) -> None:
    settings = Settings.from_environment()
    rank, ranks = settings.rank or 0, settings.size or 1
    if case.library == "refuser":
        contract.refuse(case, rank, "it never does")
    if case.library == "crasher" and rank == 1:
        raise RuntimeError("I break on rank 1")
    if case.library == "mute":
        return
    if case.library == "litterer":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if case.library in ("sleeper", "litterer"):
        sys.stderr.write("I sleep\n")
        sys.stderr.flush()
        time.sleep(600)
    result = contract.expected(case, rank, ranks)
    if case.library == "liar" and rank == 1:
        result[5] += 1
    contract.verify(case, rank, result, contract.expected(case, rank, ranks))
    pace_s = {"slow": 0.004, "fast": 0.001}.get(case.library, 0.002)
    contract.write_result(case, rank, [pace_s * (rank + 1)] * case.calls, "1.0", {"pace": str(pace_s)})


if __name__ == "__main__":
    contract.run_cases(main)
