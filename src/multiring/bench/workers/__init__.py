"""The scripts that time one library each; see contract.py."""
