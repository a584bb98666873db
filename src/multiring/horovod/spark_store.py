"""`horovod.spark.common.store`: the folder or URL where an estimator writes its training data."""


class Store(str):
    """A folder or URL, as a text for the estimators' argument `store`.

    multiring keeps nothing else there: models and checkpoints are the program's own.
    """

    __slots__ = ()

    @classmethod
    def create(cls, prefix_path: str) -> "Store":
        """Return the store at a folder or URL. Spark's file systems decide which URLs there are."""
        return cls(prefix_path)

    @property
    def prefix_path(self) -> str:
        """The folder or URL."""
        return str(self)


LocalStore = FilesystemStore = Store
