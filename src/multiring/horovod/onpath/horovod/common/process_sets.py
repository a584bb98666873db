"""Sets of ranks that run collectives together."""

from multiring._frontend.process_sets import ProcessSet as ProcessSet
from multiring._frontend.process_sets import add_process_set as add_process_set
from multiring._frontend.process_sets import global_process_set as global_process_set
from multiring._frontend.process_sets import remove_process_set as remove_process_set
