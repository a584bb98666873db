"""Engines: transports outside the native core.

The mpi engine carries data between hosts. An engine that implements contract.py has memory of its own: the nccl
engine, whose arrays are on a CUDA device.
"""
