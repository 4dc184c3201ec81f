"""Readers of MULT and MSTR made from the layouts of the original design document alone: struct and NumPy, nothing else.

They know what that document shows: header, descriptors, index and sample headers of the unified record; header, stream
table and metadata rows of the separate streams. What lies in pads, gaps and behind the samples they do not know of.
"""

import struct

import numpy as np

MOD_DESC = np.dtype([("name_hash", "<u4"), ("type_id", "<u2"), ("metadata_size", "<u2")], align=True)
SAMPLE_INDEX = np.dtype([("sample_ptr", "<u8"), ("sample_size", "<u4"), ("_pad", "<u4")], align=True)
STREAM_DESC = np.dtype(
    [
        ("name_hash", "<u4"),
        ("type_id", "<u2"),
        ("_pad", "<u2"),
        ("metadata_ptr", "<u8"),
        ("metadata_size", "<u4"),
        ("data_ptr", "<u8"),
        ("data_size", "<u8"),
    ],
    align=True,
)


def read_unified(data):
    """Reads a MULT file: descriptors, and per sample a list of (metadata, data) or None, one per modality."""
    if data[:4] != b"MULT":
        raise ValueError("Invalid magic")
    (version,) = struct.unpack("<H", data[4:6])
    (num_samples,) = struct.unpack("<I", data[6:10])
    (num_modalities,) = struct.unpack("<B", data[10:11])
    if version != 1:
        raise ValueError("Invalid version")
    header_end = 11 + num_modalities * MOD_DESC.itemsize
    descriptors = np.frombuffer(data[11:header_end], dtype=MOD_DESC)
    index = np.frombuffer(data[header_end : header_end + num_samples * SAMPLE_INDEX.itemsize], dtype=SAMPLE_INDEX)
    samples = []
    for entry in index:
        sample = data[int(entry["sample_ptr"]) :][: int(entry["sample_size"])]
        n = num_modalities
        (mask,) = struct.unpack("<I", sample[:4])
        offsets = np.frombuffer(sample[4 : 4 + 4 * n], dtype="<u4")
        sizes = np.frombuffer(sample[4 + 4 * n : 4 + 8 * n], dtype="<u4")
        row = []
        for i in range(n):
            if not mask & (1 << i):
                row.append(None)
                continue
            modality_bytes = sample[offsets[i] : offsets[i] + sizes[i]]
            metadata_size = int(descriptors[i]["metadata_size"])
            row.append((modality_bytes[:metadata_size], modality_bytes[metadata_size:]))
        samples.append(row)
    return descriptors, samples


def read_streams(data):
    """Reads an MSTR file: stream table, and per stream a list of (metadata row, data) or None, one per sample."""
    if data[:4] != b"MSTR":
        raise ValueError("Invalid magic")
    (num_samples,) = struct.unpack("<I", data[4:8])
    (num_streams,) = struct.unpack("<B", data[8:9])
    table = np.frombuffer(data[9 : 9 + num_streams * STREAM_DESC.itemsize], dtype=STREAM_DESC)
    streams = []
    for desc in table:
        start, stride = int(desc["metadata_ptr"]), int(desc["metadata_size"])
        rows = []
        for sample_id in range(num_samples):
            row = data[start + sample_id * stride : start + (sample_id + 1) * stride]
            # Every stream's metadata starts with where the data is, as the document's `read_modality` uses it.
            ptr, size = struct.unpack("<QI", row[:12])
            rows.append((row, data[ptr : ptr + size]) if ptr else None)
        streams.append(rows)
    return table, streams
