"""Which reduction a bucket has, by what was asked for."""

from collections.abc import Callable

import torch
from torch import Tensor

from multiring.runtime import Group
from multiring.torch.bucket_reductions import Plain, Predivided, Reduction, Translated
from multiring.torch.buckets import BucketLayout
from multiring.torch.options import Options
from multiring.torch.powersgd import Factored, Stages
from multiring.torch.quantized import Coded


def reductions_of(
    group: Group, second: Callable[[], Group], options: Options
) -> Callable[[BucketLayout, list[Tensor]], Reduction]:
    """Return what makes a bucket as `options` want it.

    Args:
        group: reduces; buckets keep their order in it.
        second: returns another group of the same ranks; called where PowerSGD needs one for second reductions.
        options: what was asked for.
    """
    op = "sum" if options.predivide != 1.0 else options.op
    stages = Stages(group, second()) if options.factors is not None else None

    def reduction_of(layout: BucketLayout, parameters: list[Tensor]) -> Reduction:
        if options.factors is not None and stages is not None:
            return Factored(stages, op, options.factors, layout, parameters)
        if options.translates:
            return Translated(group, op, options.compression, layout, parameters)
        if options.wire is not None and layout.dtype == torch.float32:
            return Coded(group, op, options, layout, parameters)
        return Plain(group, op, layout, parameters)

    if options.predivide == 1.0:
        return reduction_of
    return lambda layout, parameters: Predivided(reduction_of(layout, parameters), options.predivide, group.size)
