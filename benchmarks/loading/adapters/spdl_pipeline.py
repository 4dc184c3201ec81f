"""SPDL: its pipeline of threads and its decoder over the Arrow file, since the project has no format of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from benchmarks.loading.adapters.arrow_ipc import ArrowBuffers
from benchmarks.loading.adapters.base import BATCH, CORES, SIDE, Decoded, Indices, Unsupported
from benchmarks.loading.corpus import MODALITIES

_FLAGS = {"exact": "area", "fast": "fast_bilinear"}  # of FFmpeg's resize


class Spdl(ArrowBuffers):
    """Batches decoded by FFmpeg in two threads of an SPDL pipeline."""

    name: ClassVar[str] = "spdl"
    package: ClassVar[str | None] = "spdl"
    modules: ClassVar[tuple[str, ...]] = ("pyarrow", "spdl.io", "spdl.pipeline")

    def decoded(self, mode: str, *, seed: int) -> Iterator[Decoded]:
        """Runs `load_image_batch` in a stage with a thread per core, as SPDL's documentation does."""
        import spdl.io
        from spdl.pipeline import PipelineBuilder

        if mode not in _FLAGS:
            raise Unsupported("its documentation has no such loader")
        resize = f"scale={SIDE}:{SIDE}:flags={_FLAGS[mode]},format=rgb24"

        def batches() -> Iterator[Indices]:
            for epoch in range(1 << 30):
                order = np.random.default_rng((seed, epoch)).permutation(len(self))
                yield from np.split(order[: len(order) // BATCH * BATCH], len(order) // BATCH)

        def decode(indices: Indices) -> Decoded:
            images, texts, audios = self.read(indices, MODALITIES)
            buffer = spdl.io.load_image_batch(list(map(bytes, images)), width=None, height=None, filter_desc=resize)
            audio = np.stack([np.frombuffer(each, np.int16) for each in audios])
            return Decoded(spdl.io.to_numpy(buffer), [str(text, "utf-8") for text in texts], audio)

        builder = PipelineBuilder().add_source(batches()).pipe(decode, concurrency=CORES).add_sink()
        with (pipeline := builder.build(num_threads=CORES)).auto_stop():
            yield from pipeline
