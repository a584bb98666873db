"""Programs that leave their job, and join another one, with all that they had made before."""

import os
from typing import Any

from tests.wire.ranks import Here

from multiring.settings import environment_of


def rejoin(adapter: Any, here: Here, ranks: int) -> bool:
    """Leave the job, and join that of its first `ranks` ranks; return whether this is one of them."""
    adapter.shutdown()
    if here.rank >= ranks:
        return False
    place = f"{os.environ['MULTIRING_RENDEZVOUS']}-again"
    os.environ.update(environment_of(rank=here.rank, size=ranks, rendezvous=place, job=place[1:]))
    adapter.init()
    return True


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Return what two runs of the same programs have not in common."""
    return {name: (found[name], each) for name, each in wanted.items() if found[name] != each}
