"""What the bench asks of a candidate: one folder of files, and ways to read them.

A candidate that has no such way, or whose documentation gives none, raises `Unsupported` and says why; its place in
the table stays empty.
"""

from __future__ import annotations

import importlib
from abc import ABC
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.loading.corpus import Corpus, Sample

BATCH = 64  # samples
SIDE = 224  # pixels: what images are decoded to
CROP_SCALE = (0.35, 1.0)
CORES = 2  # threads or worker processes that decode

Indices: TypeAlias = npt.NDArray[np.int64]

Columns: TypeAlias = Sequence[Sequence[Any]]
"""For each modality asked for, one object per sample: a buffer of the stored bytes, or a str."""


class Unsupported(Exception):  # noqa: N818  # no error: the answer to a question
    """The candidate does not do this; the message says why."""


class Decoded(NamedTuple):
    """A batch for training.

    Attributes:
        image: (n, 224, 224, 3) uint8, array or tensor.
        text: n captions; or (n, longest) uint8 where a project only has padded bytes.
        audio: (n, 16000) int16, array or tensor.
    """

    image: Any
    text: Any
    audio: Any


class Adapter(ABC):
    """One candidate.

    Args:
        folder: where its files are, or will be; nothing else is there.

    Attributes:
        name: in tables.
        kind: ``ours``, ``other`` or ``limit``.
        package: the distribution whose version the report states; None without one.
        modules: what is imported before anything is timed.
        takes_bytes: writing stores the values' bytes as they come, and looks at none of them.
        reencodes: writing it decodes and encodes images, so that the speed of writing cannot be compared.
        shares: the candidate whose files it reads; None where it has its own.
    """

    name: ClassVar[str]
    kind: ClassVar[str] = "other"
    package: ClassVar[str | None] = None
    modules: ClassVar[tuple[str, ...]] = ()
    takes_bytes: ClassVar[bool] = False
    reencodes: ClassVar[bool] = False
    shares: ClassVar[str | None] = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        """Import what reading and decoding need."""
        for module in self.modules:
            importlib.import_module(module)

    # --- writing ------------------------------------------------------------------------------------------------------

    def pack(self, samples: Sequence[Sample]) -> None:
        """Write the files, without waiting for the disk."""
        raise Unsupported("has no files of its own")

    def encode(self, samples: Sequence[Sample]) -> Any:
        """The samples as `pack_encoded` takes them; where values are written as they are, the samples."""
        if not self.takes_bytes:
            raise Unsupported("encodes while it writes; see write")
        return samples

    def pack_encoded(self, encoded: Any) -> None:
        """Write the files out of what `encode` gave."""
        self.pack(encoded)

    def pack_at_size(self, corpus: Corpus) -> None:
        """Write the files with images at training size, as JPEGs of 224 x 224."""
        raise Unsupported("not compared: what is stored at this size needs no resizing in any format")

    def pack_large(self, num_samples: int) -> None:
        """Write files of many samples with next to nothing in them."""
        raise Unsupported("not compared with so many samples")

    # --- reading ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the files for reading, so far that the number of samples is known."""
        raise Unsupported("is not opened")

    def __len__(self) -> int:
        """Samples."""
        raise Unsupported("does not know the number of its samples")

    def read(self, indices: Indices, modalities: Sequence[str]) -> Columns:
        """The stored bytes of some samples, each modality a sequence in the order of `indices`."""
        raise Unsupported("has no access by index")

    def random(self, modalities: Sequence[str], batches: Iterable[Indices]) -> Iterator[Columns]:
        """The stored bytes of one batch after the other, in the given order if the project has random access."""
        for indices in batches:
            yield self.read(indices, modalities)

    def sequential(self, modalities: Sequence[str]) -> Iterator[Columns]:
        """The stored bytes of all samples from the first to the last, in runs of any length."""
        raise Unsupported("has no scan")

    def decoded(self, mode: str, *, seed: int) -> Iterator[Decoded]:
        """Shuffled batches for training, epoch after epoch, decoded on two cores.

        Args:
            mode: ``exact``: decoded in full, then resized by areas; ``fast``: decoded at a fraction where that is
                large enough, then resized bilinearly; ``stored``: of files made by `pack_at_size`; ``crop``: a random
                crop with a part of the area in `CROP_SCALE`, half of them mirrored, resized bilinearly.
            seed: of the order.
        """
        raise Unsupported("does not decode")

    def close(self) -> None:  # noqa: B027  # most candidates have nothing to close
        """Release the files."""
