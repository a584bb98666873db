"""Trained models: networks, preprocessing in the graph, the description of a model, and answers as labels."""
