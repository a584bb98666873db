"""The project folder: pictures, `labels.sqlite` with what is known of them, and `runs/`."""
