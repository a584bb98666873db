"""The variables of other programs that multiring reads, with their meanings."""

from types import MappingProxyType

# The variables that other launchers set for their ranks. They are only read, and only if MULTIRING_RANK is not set.
FOREIGN_VARIABLES = MappingProxyType(
    {
        "TF_NUM_INTEROP_THREADS": "TensorFlow: number of operations that run at once",
        "TF_NUM_INTRAOP_THREADS": "TensorFlow: number of threads of an operation",
        "TORCHELASTIC_RUN_ID": "torchrun: name of the job",
        "TORCHELASTIC_RESTART_COUNT": "torchrun: number of restarts of the job",
        "TORCHELASTIC_USE_AGENT_STORE": "torchrun: whether torchrun itself serves torch's store",
        "RANK": "torchrun: this process's rank",
        "WORLD_SIZE": "torchrun: number of ranks of the job",
        "LOCAL_RANK": "torchrun: this process's rank on its host",
        "LOCAL_WORLD_SIZE": "torchrun: number of ranks on this host",
        "MASTER_ADDR": "torchrun: host of rank 0",
        "MASTER_PORT": "torchrun: port of torch's own store",
        "MPI_LOCALRANKID": "Hydra (MPICH, Intel MPI): this process's rank on its host",
        "MPI_LOCALNRANKS": "Hydra (MPICH, Intel MPI): number of ranks on this host",
        "PMI_RANK": "Hydra and others that speak PMI: this process's rank",
        "PMI_SIZE": "Hydra and others that speak PMI: number of ranks of the job",
        "OMPI_COMM_WORLD_RANK": "Open MPI: this process's rank",
        "OMPI_COMM_WORLD_SIZE": "Open MPI: number of ranks of the job",
        "OMPI_COMM_WORLD_LOCAL_RANK": "Open MPI: this process's rank on its host",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "Open MPI: number of ranks on this host",
        "PMIX_RANK": "launchers that speak PMIx: this process's rank",
        "SLURM_JOB_ID": "srun: number of the allocation",
        "SLURM_STEP_ID": "srun: number of the job step",
        "SLURM_PROCID": "srun: this process's rank",
        "SLURM_STEP_NUM_TASKS": "srun: number of ranks of the step",
        "SLURM_NTASKS": "srun: number of ranks of the allocation or step",
        "SLURM_STEP_NUM_NODES": "srun: number of hosts of the step",
        "SLURM_NNODES": "srun: number of hosts of the allocation or step",
        "SLURM_LOCALID": "srun: this process's rank on its host",
        "SLURM_STEP_NODELIST": "srun: hosts of the step",
        "SLURM_RESTART_COUNT": "Slurm: number of times that the job was requeued",
        "SLURM_SUBMIT_DIR": "Slurm: folder in which the job was submitted",
        "PMI_FD": "srun --mpi=pmi2 and others that speak PMI: socket of the launcher",
        "PMI_JOBID": "srun --mpi=pmi2 and others that speak PMI: name of the job step",
        "PMIX_NAMESPACE": "launchers that speak PMIx: name of the job step",
    }
)
