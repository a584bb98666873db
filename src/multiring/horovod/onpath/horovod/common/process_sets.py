"""Sets of ranks that run collectives together."""

from multiring._frontend.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
