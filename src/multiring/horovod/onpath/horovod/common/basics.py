"""HorovodBasics: ranks, sizes and build information as methods."""

from multiring._frontend import build_questions, lifecycle, reduce_ops, timeline


class HorovodBasics:
    """The functions that all adapters share.

    All instances behave the same, for any arguments.

    Args:
        pkg_path: not used.
        args: not used.
    """

    Average, Sum, Adasum = reduce_ops.Average, reduce_ops.Sum, reduce_ops.Adasum
    Min, Max, Product = reduce_ops.Min, reduce_ops.Max, reduce_ops.Product

    def __init__(self, pkg_path: str, *args: str) -> None:
        """Ignore the arguments: there is no compiled module to load."""

    ccl_built = staticmethod(build_questions.ccl_built)
    cross_rank = staticmethod(lifecycle.cross_rank)
    cross_size = staticmethod(lifecycle.cross_size)
    cuda_built = staticmethod(build_questions.cuda_built)
    ddl_built = staticmethod(build_questions.ddl_built)
    gloo_built = staticmethod(build_questions.gloo_built)
    gloo_enabled = staticmethod(build_questions.gloo_enabled)
    init = staticmethod(lifecycle.init)
    is_homogeneous = staticmethod(lifecycle.is_homogeneous)
    is_initialized = staticmethod(lifecycle.is_initialized)
    local_rank = staticmethod(lifecycle.local_rank)
    local_size = staticmethod(lifecycle.local_size)
    mpi_built = staticmethod(build_questions.mpi_built)
    mpi_enabled = staticmethod(build_questions.mpi_enabled)
    mpi_threads_supported = staticmethod(lifecycle.mpi_threads_supported)
    nccl_built = staticmethod(build_questions.nccl_built)
    rank = staticmethod(lifecycle.rank)
    rocm_built = staticmethod(build_questions.rocm_built)
    shutdown = staticmethod(lifecycle.shutdown)
    size = staticmethod(lifecycle.size)
    start_timeline = staticmethod(timeline.start_timeline)
    stop_timeline = staticmethod(timeline.stop_timeline)
