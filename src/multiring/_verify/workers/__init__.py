"""Programs that `multiring verify` starts as ranks."""
