"""The places for training data."""
