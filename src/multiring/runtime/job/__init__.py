"""This process's membership of its job, and its threads."""
