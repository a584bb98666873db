"""Functions that read a rank and a size from the environment."""

from multiring.horovod.arguments import IGNORE_REGEXES as IGNORE_REGEXES
from multiring.horovod.arguments import KUBEFLOW_MPI_EXEC as KUBEFLOW_MPI_EXEC
from multiring.horovod.arguments import LOG_LEVEL_STR as LOG_LEVEL_STR
from multiring.horovod.arguments import get_env_rank_and_size as get_env_rank_and_size
from multiring.horovod.arguments import is_exportable as is_exportable
from multiring.horovod.arguments import is_kubeflow_mpi as is_kubeflow_mpi
