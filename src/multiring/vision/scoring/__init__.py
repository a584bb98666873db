"""Score a trained model on labelled pictures: figures, a report file, comparison, and the state of production."""
