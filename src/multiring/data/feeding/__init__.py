"""Batches that workers prepare ahead of time. Threads and processes make the same batches."""
