"""Experiments on how CUDA, PyTorch's CUDA layer and NCCL behave, and what an H100 showed (h100.json).

A behaviour is a small experiment with a result that does not depend on time, such as the error code of a call or the
value that a copy saw. What the tests use in place of a GPU must behave as the recorded device does.
"""
