"""Elastic training: it resumes from the last commit after a failure."""
