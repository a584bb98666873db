"""ImageFolder: a folder for each class, with one image in each file."""

from multiring.data.readers.limits import require_size
from multiring.data.readers.source import Image, Numbering, Opening, Record, Shard, digest_of
from multiring.data.readers.storage import read, with_endings
from multiring.errors import DataError

ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class FolderSource:
    """Images whose label is the number of their folder in the sorted list of folders."""

    format = "imagefolder"
    reads_records = True

    def __init__(self, opening: Opening) -> None:
        self._storage, self._limits = opening.storage, opening.limits
        names = with_endings(opening.names, *ENDINGS)
        loose = next((name for name in names if "/" not in name), None)
        if not names or loose is not None:
            found = f"{loose} is in no folder" if loose is not None else "there is no image"
            raise DataError(f"{opening.storage.url}: want a folder for each class, with images in it; {found}")
        self.classes = sorted({name.partition("/")[0] for name in names})
        self._labels = {name: number for number, name in enumerate(self.classes)}
        self.shards = [Shard(name=name, size_bytes=self._storage.size(name), samples=1) for name in names]
        self.numbering = Numbering(self.shards)
        self.digest = digest_of(self.format, self.shards)

    def record(self, number: int) -> Record:
        """Return {"image": ..., "label": the class's number, "name": the file's name}."""
        self.numbering.place(number)
        shard = self.shards[number]
        require_size(f"{self._storage.url}/{shard.name}", shard.size_bytes, self._limits.record_bytes, "the limit")
        label = self._labels[shard.name.partition("/")[0]]
        return {"image": Image(read(self._storage, shard.name)), "label": label, "name": shard.name}
