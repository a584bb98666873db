"""Who a process is, as an object with Horovod's methods."""

from multiring import torch


class HorovodBasics:
    """`multiring.torch`'s functions; every instance is the same, whatever compiled module it is asked for.

    Args:
        pkg_path: not used.
        args: not used.
    """

    Average, Sum, Adasum = torch.Average, torch.Sum, torch.Adasum
    Min, Max, Product = torch.Min, torch.Max, torch.Product

    def __init__(self, pkg_path: str, *args: str) -> None:
        """Nothing is loaded."""

    ccl_built = staticmethod(torch.ccl_built)
    cross_rank = staticmethod(torch.cross_rank)
    cross_size = staticmethod(torch.cross_size)
    cuda_built = staticmethod(torch.cuda_built)
    ddl_built = staticmethod(torch.ddl_built)
    gloo_built = staticmethod(torch.gloo_built)
    gloo_enabled = staticmethod(torch.gloo_enabled)
    init = staticmethod(torch.init)
    is_homogeneous = staticmethod(torch.is_homogeneous)
    is_initialized = staticmethod(torch.is_initialized)
    local_rank = staticmethod(torch.local_rank)
    local_size = staticmethod(torch.local_size)
    mpi_built = staticmethod(torch.mpi_built)
    mpi_enabled = staticmethod(torch.mpi_enabled)
    mpi_threads_supported = staticmethod(torch.mpi_threads_supported)
    nccl_built = staticmethod(torch.nccl_built)
    rank = staticmethod(torch.rank)
    rocm_built = staticmethod(torch.rocm_built)
    shutdown = staticmethod(torch.shutdown)
    size = staticmethod(torch.size)
    start_timeline = staticmethod(torch.start_timeline)
    stop_timeline = staticmethod(torch.stop_timeline)
