"""Run functions in threads."""

from multiring.horovod.threads import execute_function_multithreaded as execute_function_multithreaded
from multiring.horovod.threads import in_thread as in_thread
from multiring.horovod.threads import on_event as on_event
