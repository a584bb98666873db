"""Functions that read a rank and a size from the environment."""

from multiring.horovod.arguments import (
    IGNORE_REGEXES,
    KUBEFLOW_MPI_EXEC,
    LOG_LEVEL_STR,
    get_env_rank_and_size,
    is_exportable,
    is_kubeflow_mpi,
)
