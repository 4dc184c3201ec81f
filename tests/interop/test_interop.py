"""Other projects' libraries write what is packed here, and open what is exported here."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import mm_assets
from mm_assets.exports.export import EXPORTS
from mm_assets.exports.samples import SampleFiles, member_key

from ..exports.export_suite import payloads
from .conftest import Interop
from .owners import describe

WRITTEN = ("webdataset", "energon", "zip", "folder", "mds", "litdata", "hf", "arrow", "parquet", "lance")
"""Formats that other libraries write."""

EXPORTED = tuple(name for name in EXPORTS if name != "lerobot")
"""Formats whose samples are files; LeRobot has episodes, and tests of its own."""

Described = tuple[str, dict[str, list[object]]]


def described(manifest: Path) -> Iterator[Described]:
    """Yields what an export has to hold: the files of the packed samples."""
    with mm_assets.open(manifest) as dataset:
        for sample in SampleFiles(dataset).samples(0, len(dataset)):
            yield member_key(sample.key), {file.suffix: describe(file.suffix, file.content) for file in sample.files()}


def members(shard: Path) -> dict[str, list[object]]:
    """Returns what each member of a tar is."""
    with tarfile.open(shard) as tar:
        files = {member.name: tar.extractfile(member) for member in tar}
        contents = {name: file.read() for name, file in files.items() if file is not None}
    return {name: describe(name.rpartition("/")[2].partition(".")[2], data) for name, data in contents.items()}


@pytest.mark.parametrize("format", WRITTEN)
def test_what_owners_write_is_packed_to_the_same_bytes(interop: Interop, format: str, corpus: str) -> None:
    """One dataset gives the same ids, records and data of every modality from each container."""
    assert payloads(interop.packed_written(format, corpus)) == payloads(interop.packed_tar(corpus))
    interop.results.append(("packed", format, corpus))


@pytest.mark.parametrize("format", EXPORTED)
def test_owners_open_exports(interop: Interop, format: str, corpus: str) -> None:
    """The owner's library reads all samples in order; bytes, arrays, pixels and audio samples are the shard's."""
    manifest = interop.packed_tar(corpus)
    assert interop.read(format, corpus) == [list(sample) for sample in described(manifest)]
    if corpus != "tiffs":  # whose frames become files
        files = {
            f"{key}.{suffix}": content for key, sample in described(manifest) for suffix, content in sample.items()
        }
        assert files == members(interop.corpora[corpus])
    interop.results.append(("opened", format, corpus))


@pytest.mark.parametrize("format", EXPORTED)
@pytest.mark.parametrize("source", WRITTEN)
@pytest.mark.parametrize("corpus", ["captions", "steps"])
def test_every_pair_keeps_payloads(interop: Interop, source: str, format: str, corpus: str) -> None:
    """What an owner wrote, packed, exported to any format and packed again has the same ids, records and data."""
    before = interop.packed_written(source, corpus)
    folder = interop.exported(before, format, f"{source}/{format}/{corpus}")
    again = payloads(interop.packed(folder, f"{source}/{format}/{corpus}"))
    assert again == payloads(before)
    interop.results.append(("pair", f"{source} {format}", corpus))
