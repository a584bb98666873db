"""Collectives on tensors, and functions for ranks and sizes."""

from multiring import torch
from multiring.horovod.arguments import get_average_backwards_compatibility_fun
from multiring.torch import Adasum as Adasum
from multiring.torch import Average as Average
from multiring.torch import HorovodInternalError as HorovodInternalError
from multiring.torch import Max as Max
from multiring.torch import Min as Min
from multiring.torch import ProcessSet as ProcessSet
from multiring.torch import Product as Product
from multiring.torch import Sum as Sum
from multiring.torch import add_process_set as add_process_set
from multiring.torch import allgather as allgather
from multiring.torch import allgather_async as allgather_async
from multiring.torch import allreduce as allreduce
from multiring.torch import allreduce_ as allreduce_
from multiring.torch import allreduce_async as allreduce_async
from multiring.torch import allreduce_async_ as allreduce_async_
from multiring.torch import alltoall as alltoall
from multiring.torch import alltoall_async as alltoall_async
from multiring.torch import barrier as barrier
from multiring.torch import broadcast as broadcast
from multiring.torch import broadcast_ as broadcast_
from multiring.torch import broadcast_async as broadcast_async
from multiring.torch import broadcast_async_ as broadcast_async_
from multiring.torch import ccl_built as ccl_built
from multiring.torch import cross_rank as cross_rank
from multiring.torch import cross_size as cross_size
from multiring.torch import cuda_built as cuda_built
from multiring.torch import ddl_built as ddl_built
from multiring.torch import global_process_set as global_process_set
from multiring.torch import gloo_built as gloo_built
from multiring.torch import gloo_enabled as gloo_enabled
from multiring.torch import grouped_allgather as grouped_allgather
from multiring.torch import grouped_allgather_async as grouped_allgather_async
from multiring.torch import grouped_allreduce as grouped_allreduce
from multiring.torch import grouped_allreduce_ as grouped_allreduce_
from multiring.torch import grouped_allreduce_async as grouped_allreduce_async
from multiring.torch import grouped_allreduce_async_ as grouped_allreduce_async_
from multiring.torch import grouped_reducescatter as grouped_reducescatter
from multiring.torch import grouped_reducescatter_async as grouped_reducescatter_async
from multiring.torch import init as init
from multiring.torch import is_homogeneous as is_homogeneous
from multiring.torch import is_initialized as is_initialized
from multiring.torch import join as join
from multiring.torch import local_rank as local_rank
from multiring.torch import local_size as local_size
from multiring.torch import mpi_built as mpi_built
from multiring.torch import mpi_enabled as mpi_enabled
from multiring.torch import mpi_threads_supported as mpi_threads_supported
from multiring.torch import nccl_built as nccl_built
from multiring.torch import poll as poll
from multiring.torch import rank as rank
from multiring.torch import reducescatter as reducescatter
from multiring.torch import reducescatter_async as reducescatter_async
from multiring.torch import remove_process_set as remove_process_set
from multiring.torch import rocm_built as rocm_built
from multiring.torch import shutdown as shutdown
from multiring.torch import size as size
from multiring.torch import sparse_allreduce_async as sparse_allreduce_async
from multiring.torch import start_timeline as start_timeline
from multiring.torch import stop_timeline as stop_timeline
from multiring.torch import synchronize as synchronize

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(torch)
