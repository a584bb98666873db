"""What torch loads when it is imported: it learns that there is a backend "multiring", and nothing else happens.

A package of its own, because importing anything of `multiring` loads its runtime, which is to wait until a process
group is made.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any


def register() -> None:
    """Make `init_process_group("multiring")` mean multiring; torch's entry point "torch.backends" calls it.

    And `init_method="multiring://"` have ranks meet as `multiring.init` does: under mpiexec and srun, which tell torch
    nothing, too.

    May be called again. Where this torch has no torch.distributed, nothing happens.
    """
    import torch.distributed as dist  # noqa: PLC0415 -- torch is being imported when its entry points are looked up

    if dist.is_available():
        from torch.distributed.rendezvous import register_rendezvous_handler  # noqa: PLC0415 -- as above

        dist.Backend.register_backend("multiring", _create, extended_api=True, devices=["cpu"])
        with suppress(RuntimeError):  # it is registered already
            register_rendezvous_handler("multiring", _rendezvous)  # type: ignore[no-untyped-call] # torch's own


def _create(options: Any, pg_options: Any) -> Any:
    from multiring.torch.c10d.creating import create  # noqa: PLC0415 -- see above

    return create(options, pg_options)


def _rendezvous(url: str, **options: Any) -> Iterator[Any]:
    from multiring.torch.c10d.stores import store_of_job  # noqa: PLC0415 -- see above

    yield store_of_job(url, options.get("timeout"))
    raise RuntimeError("multiring:// meets once; call init_process_group again")
