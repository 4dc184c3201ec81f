"""Writes samples of packed MULT and MSTR files as WebDataset tars, with Python alone: python leave.py [FOLDER].

A payload that is not a file becomes .payload: its record and its data, described in docs/spec/.
"""

import io
import json
import mmap
import os
import struct
import sys
import tarfile

FILES: list = []  # paths of packed files, relative to this script
MAGIC = "ffd8ff jpg 89504e47 png 47494638 gif 424d bmp 49492a00 tif 4d4d002a tif 664c6143 flac 4f676753 ogg 494433 mp3"
MAGIC = f"{MAGIC} fffb mp3 4d546864 mid 1a45dfa3 mkv".split()  # first bytes, and the extension
KINDS = ("image", "text", "audio", "video", "clip", "array", "midi", "binary", "document", "metadata")  # not roles


def extension(data):
    head = bytes(data[:16])
    if head[4:8] == b"ftyp":
        return "mov" if head[8:10] == b"qt" else "avif" if head[8:12] == b"avif" else "mp4"
    if head[:4] == b"RIFF":
        return {b"WAVE": "wav", b"AVI ": "avi", b"WEBP": "webp"}.get(head[8:12], "bin")
    return next((name for magic, name in zip(MAGIC[::2], MAGIC[1::2]) if head.startswith(bytes.fromhex(magic))), "bin")


def npy(record, data):
    dtype, rank = record[:6].rstrip(b"\0").decode(), record[6]
    shape = struct.unpack_from(f"<{rank}I", record, 8)
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape!r}, }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text.encode() + bytes(data)


def contents(type_id, config, record, data):  # yields the suffix and the bytes of each file in a payload
    if type_id == 60:
        count, inner, size = struct.unpack_from("<IHH", record)
        at = (4 * count + 7) // 8 * 8
        positions = struct.unpack_from(f"<{count}i", data)
        starts = struct.unpack_from(f"<{count + 1}Q", data, at)
        records = at + 8 * (count + 1)
        for k, position in enumerate(positions):
            item = data[records + size * k : records + size * (k + 1)]
            for suffix, content in contents(inner, config["inner"]["config"], item, data[starts[k] : starts[k + 1]]):
                yield f"{position}.{suffix}", content
    elif type_id in (2, 3):
        yield ("txt" if type_id == 2 else "json"), data
    elif type_id == 4:
        yield "npy", npy(bytes(record), data)
    elif type_id == 5:
        code = {"f": "<d", "u": "<Q", "b": "<Q", "i": "<q"}[config.get("dtype", "float64")[0]]
        yield "txt", repr(struct.unpack_from(code, record)[0]).encode()
    elif type_id == 1 or (type_id in (10, 11, 40, 41, 50) and extension(data) != "bin"):
        yield extension(data), data
    else:
        yield "payload", bytes(record) + bytes(data)


def samples(file):  # yields the id of each sample, and its payloads: modality, record, data
    is_mult = file[:4] == b"MULT"
    (table,) = struct.unpack_from("<Q", file, len(file) - 32 if is_mult else 4064)
    (number,) = struct.unpack_from("<I", file, table)
    entries = (struct.unpack_from("<IIQQ", file, table + 8 + 24 * n) for n in range(number))
    sections = {kind: (at, at + size) for kind, _, at, size in entries}
    modalities = json.loads(file[slice(*sections[1])])["modalities"]
    (count,) = struct.unpack_from("<I", file, 6 if is_mult else 4)
    ids, blob = sections[2][0], sections[2][0] + 8 * (count + 1)
    for i in range(count):
        start, end = struct.unpack_from("<QQ", file, ids + 8 * i)
        payloads = []
        for m, modality in enumerate(modalities):
            if is_mult:
                column = sections[3][0] + 16 * count * m
                (at,) = struct.unpack_from("<Q", file, column + 8 * i)
                size = struct.unpack_from("<I", file, column + 8 * count + 4 * i)[0] - modality["metadata_size"]
                record, at = file[at : at + modality["metadata_size"]], at and at + modality["metadata_size"]
            else:
                rows, row = struct.unpack_from("<QI", file, 9 + 40 * m + 8)
                at, size = struct.unpack_from("<QI", file, rows + row * i)
                record = file[rows + row * i + 16 : rows + row * (i + 1)]
            if at:
                payloads.append((modality, record, file[at : at + size]))
        yield file[blob + start : blob + end].decode(), payloads


here, folder = os.path.dirname(os.path.abspath(__file__)), (sys.argv[1:] or ["tars"])[0]
for path in FILES:
    target = os.path.join(folder, os.path.basename(path).rpartition(".")[0] + ".tar")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(here, path), "rb") as packed, tarfile.open(target, "w") as tar:
        for sample_id, payloads in samples(mmap.mmap(packed.fileno(), 0, access=mmap.ACCESS_READ)):
            key = sample_id.replace("%", "%25").replace(".", "%2E").lstrip("/")
            for modality, record, data in payloads:
                start = key if modality["name"] in KINDS else f"{key}.{modality['name']}"
                for suffix, content in contents(modality["type_id"], modality["config"], record, data):
                    member = tarfile.TarInfo(f"{start}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
