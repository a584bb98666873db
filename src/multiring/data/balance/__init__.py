"""What bounds a training: its data, its computation or its wire."""
