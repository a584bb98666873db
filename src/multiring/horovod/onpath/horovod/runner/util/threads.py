"""Run functions in threads."""

from multiring.horovod.threads import execute_function_multithreaded, in_thread, on_event
