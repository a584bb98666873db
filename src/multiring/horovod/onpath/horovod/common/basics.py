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


_QUERIES = ("cross_rank", "cross_size", "is_homogeneous", "is_initialized", "local_rank", "local_size", "rank", "size")
for _module, _names in (
    (build_questions, build_questions.__all__),
    (lifecycle, ("init", "shutdown", "mpi_threads_supported", *_QUERIES)),
    (timeline, ("start_timeline", "stop_timeline")),
):
    for _name in _names:
        setattr(HorovodBasics, _name, staticmethod(getattr(_module, _name)))
