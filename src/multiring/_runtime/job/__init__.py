"""This process in its job: joining and leaving, its role, and its threads."""
