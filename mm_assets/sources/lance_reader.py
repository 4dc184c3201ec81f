"""Writes the rows of fragments of Lance datasets to standard output as Arrow streams: a process of `sources.lance`.

Lance trusts the files that it reads: a damaged one may end the process or take any memory, and its threads do not
survive a fork. So it is loaded only here. A request is a line of JSON on standard input. An error ends the process,
and is the last line of standard error. This file is run as a script, and imports nothing of the project.
"""

import json
import resource
import sys
from typing import Any


def write_rows(request: dict[str, Any]) -> None:
    """Answers a request.

    Raises:
        LookupError: the file is not the first one of a fragment.
        ValueError: the dataset has files in other folders.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (request["max_bytes"],) * 2)

    import lance
    import pyarrow as pa

    dataset = lance.dataset(request["dataset"], storage_options=request["options"])
    if dataset.base_paths():
        raise ValueError(f"its version {dataset.version} has files in other folders, {request['clone_advice']}")
    for fragment in dataset.get_fragments():
        files = fragment.data_files()
        if files[0].path == request["shard"]:
            break
    else:
        raise LookupError(f"it is not the first file of a fragment of version {dataset.version}, the newest one")
    scanner = dataset.scanner(
        fragments=[fragment],
        batch_size=request["batch_rows"],
        batch_size_bytes=request["batch_bytes"],
        batch_readahead=1,
        io_buffer_size=request["batch_bytes"],
        scan_in_order=True,
        with_row_address=True,
        blob_handling="blobs_descriptions",
    )
    reader = scanner.to_reader()
    file_of_field = {number: file.path for file in reversed(files) for number in file.fields}
    blobs = {
        field.name(): file_of_field.get(field.id())
        for field, arrow_field in zip(dataset.lance_schema.fields(), dataset.schema, strict=True)
        if _is_blob(arrow_field)
    }
    schema = reader.schema.with_metadata({"mm_assets": json.dumps(blobs)})
    with pa.ipc.new_stream(sys.stdout.buffer, schema) as stream:
        for batch in reader:
            stream.write_batch(batch.replace_schema_metadata(schema.metadata))
    sys.stdout.buffer.write(b"\n")  # the rows did not end early
    sys.stdout.buffer.flush()


def _is_blob(field: Any) -> bool:
    is_second_version = getattr(field.type, "extension_name", None) == "lance.blob.v2"
    return is_second_version or (field.metadata or {}).get(b"lance-encoding:blob") == b"true"


if __name__ == "__main__":
    for line in sys.stdin:
        write_rows(json.loads(line))
