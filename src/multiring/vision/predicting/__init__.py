"""Predict labels for pictures and videos with a trained model, on any number of ranks."""
