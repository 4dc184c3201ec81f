"""NeMo Curator's interleaved reader, aspect ratio filter and Parquet writer; runs with an interpreter that has it.

PYTHON curator.py lazy|eager|ray OUT SHARD...

`lazy` and `eager` call the stages one after the other in this process, media read when they are written or when the
shard is read; `ray` runs them as a pipeline, with the executor that works on two cores.
"""

from __future__ import annotations

import json
import sys
import time

# An interpreter of its own: it has nothing of this project.
FILTER = {"min_aspect_ratio": 0.2, "max_aspect_ratio": 5.0}


def direct(out: str, shards: list[str], *, eager: bool) -> None:
    """One shard after the other through the three stages."""
    from nemo_curator.stages.interleaved.io.readers.webdataset import InterleavedWebdatasetReaderStage
    from nemo_curator.stages.interleaved.io.writers.tabular import InterleavedParquetWriterStage
    from nemo_curator.stages.interleaved.stages import InterleavedAspectRatioFilterStage
    from nemo_curator.tasks import FileGroupTask

    reader = InterleavedWebdatasetReaderStage(materialize_on_read=eager)
    chosen = InterleavedAspectRatioFilterStage(**FILTER)
    writer = InterleavedParquetWriterStage(path=out)
    for shard in shards:
        read = reader.process(FileGroupTask(dataset_name="ingest", data=[shard], _metadata={"source_files": [shard]}))
        for batch in read if isinstance(read, list) else [read]:
            writer.process(chosen.process(batch))


def pipeline(out: str, shards: list[str]) -> None:
    """The same as a pipeline on Ray."""
    from nemo_curator.backends.ray_data import RayDataExecutor
    from nemo_curator.core.client import RayClient
    from nemo_curator.pipeline import Pipeline
    from nemo_curator.stages.interleaved.io.reader import InterleavedWebdatasetReader
    from nemo_curator.stages.interleaved.io.writers.tabular import InterleavedParquetWriterStage
    from nemo_curator.stages.interleaved.stages import InterleavedAspectRatioFilterStage

    client = RayClient()
    client.start()
    try:
        stages = [
            InterleavedWebdatasetReader(file_paths=shards, files_per_partition=1),
            InterleavedAspectRatioFilterStage(**FILTER),
            InterleavedParquetWriterStage(path=out),
        ]
        Pipeline(name="ingest", stages=stages).run(RayDataExecutor())
    finally:
        client.stop()


def main() -> None:
    """Imports, then runs, and prints the seconds of the latter."""
    way, out, *shards = sys.argv[1:]
    if way != "ray":
        import nemo_curator.stages.interleaved.io.writers.tabular
        import nemo_curator.stages.interleaved.stages  # noqa: F401  # imports are not the stages' time
    began, used = time.perf_counter(), time.process_time()
    if way == "ray":
        pipeline(out, shards)
    else:
        direct(out, shards, eager=way == "eager")
    print(json.dumps({"seconds": time.perf_counter() - began, "processor_seconds": time.process_time() - used}))


if __name__ == "__main__":
    main()
