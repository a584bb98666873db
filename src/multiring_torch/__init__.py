"""Register the backend "multiring" when torch is imported.

Torch loads this package by an entry point.

It is a separate package, because importing anything of `multiring` loads its runtime. The runtime must not be loaded
before a process group is made.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any


def register() -> None:
    """Register the backend "multiring" with torch.distributed.

    Torch's entry point "torch.backends" calls this.

    Then `init_process_group("multiring")` uses multiring. `init_method="multiring://"` lets ranks meet as in
    `multiring.init`, even under mpiexec and srun, which set no variables for torch.

    The function may be called again. It does nothing if this torch has no torch.distributed.
    """
    import torch.distributed as dist  # noqa: PLC0415 -- entry points are loaded while torch is being imported

    if dist.is_available():
        from torch.distributed.rendezvous import register_rendezvous_handler  # noqa: PLC0415 -- as above

        dist.Backend.register_backend("multiring", _create, extended_api=True, devices=["cpu", "cuda"])
        with suppress(RuntimeError):  # already registered
            register_rendezvous_handler("multiring", _rendezvous)  # type: ignore[no-untyped-call] # torch's own


def _create(options: Any, pg_options: Any) -> Any:
    from multiring.torch.c10d.creating import create  # noqa: PLC0415 -- see above

    return create(options, pg_options)


def _rendezvous(url: str, **options: Any) -> Iterator[Any]:
    from multiring.torch.c10d.stores import store_of_job  # noqa: PLC0415 -- see above

    yield store_of_job(url, options.get("timeout"))
    raise RuntimeError("multiring:// meets once; call init_process_group again")
