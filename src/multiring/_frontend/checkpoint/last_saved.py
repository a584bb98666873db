"""The last checkpoint that this process has saved or loaded, for errors that tell what to do."""

_last: list[str] = []


def note_saved(path: str) -> None:
    """Note that the checkpoint at `path` is complete."""
    _last[:] = [path]


def last_saved() -> str:
    """Return a sentence that names the last checkpoint."""
    if not _last:
        return "The job has saved no checkpoint with `save`: start it again from one, if the program has its own"
    return f"Start the job again from the last checkpoint, {_last[0]}"
