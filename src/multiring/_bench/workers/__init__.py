"""Scripts that time one library each; see contract.py."""
