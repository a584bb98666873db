"""What carries bytes and is not in the native core: MPI."""
