"""Engines: transports outside the native core, such as MPI, and the interface of engines with memory of their own."""
