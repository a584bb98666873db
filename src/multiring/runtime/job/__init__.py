"""This process's membership in its job: joining and leaving, its role, and its threads."""
