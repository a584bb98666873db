"""Choose the reduction of each bucket by the options."""

from collections.abc import Callable, Sequence

from multiring._gradients.buckets import BucketLayout, GradientSpec
from multiring._gradients.options import GradientOptions
from multiring._gradients.powersgd import Factored, Stages
from multiring._gradients.quantized import Coded
from multiring._gradients.reductions import ArrayReduction, Plain, Zeros, zeros_in_arena, zeros_of_rank
from multiring._runtime import Group

ReductionOf = Callable[[BucketLayout, Sequence[GradientSpec]], ArrayReduction]


def reductions_of(
    group: Group, second: Callable[[], Group], options: GradientOptions, zeros: Zeros | None = None
) -> ReductionOf:
    """Return a factory for bucket reductions configured by `options`.

    The caller applies compressors and, with `predivide`, the divisor.

    Args:
        group: the group that reduces. Its operations follow the order of the buckets.
        second: a function that returns another group of the same ranks; it is called only for PowerSGD, for the second
            reductions.
        options: the options.
        zeros: makes the memory of the gradients; by default, it is where the reduction is fastest.
    """
    op = "sum" if options.predivide != 1.0 else options.op
    stages = Stages(group, second()) if options.factors is not None else None

    def reduction_of(layout: BucketLayout, specs: Sequence[GradientSpec]) -> ArrayReduction:
        if options.factors is not None and stages is not None:
            return Factored(stages, op, options.factors, layout, specs, zeros or zeros_of_rank)
        if options.wire is not None and layout.dtype == "float32":
            return Coded(group, op, options, layout, specs, zeros or zeros_in_arena)
        return Plain(group, op, layout, specs, zeros or zeros_in_arena)

    return reduction_of
