"""The limits that the kernel sets for this process: processes, threads, and its control groups."""
