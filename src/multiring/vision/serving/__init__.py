"""Serve exported models over HTTP, by the Open Inference Protocol and for pictures."""
