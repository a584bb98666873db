"""Sets of ranks that do collectives together."""

from multiring.torch import ProcessSet as ProcessSet
from multiring.torch import add_process_set as add_process_set
from multiring.torch import global_process_set as global_process_set
from multiring.torch import remove_process_set as remove_process_set
