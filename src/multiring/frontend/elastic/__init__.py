"""Training that goes on after a failure, from where it last committed."""
