"""The packed formats MULT and MSTR: containers of opaque payloads. docs/spec/format.md is normative.

Standard library, NumPy and crc32c only. A container stores bytes; fields know what they mean. Neither imports the
other.
"""

from mm_assets.formats.batch import Chunk, Column
from mm_assets.formats.byte_source import ByteSource, MappedFile
from mm_assets.formats.convert import convert, open_reader
from mm_assets.formats.joined import JoinedReader
from mm_assets.formats.mstr_add import add_stream
from mm_assets.formats.mstr_reader import MstrReader
from mm_assets.formats.mstr_writer import MstrWriter, write_mstr
from mm_assets.formats.mult_reader import MultReader
from mm_assets.formats.mult_writer import MultWriter
from mm_assets.formats.records import Buffer, ModalitySpec, Payload, crc32c, crc32c_each, name_hash
from mm_assets.formats.report import FileDamage, VerifyReport, WriteSummary
from mm_assets.formats.sample_ids import SampleIds

__all__ = [
    "Buffer",
    "ByteSource",
    "Chunk",
    "Column",
    "FileDamage",
    "JoinedReader",
    "MappedFile",
    "ModalitySpec",
    "MstrReader",
    "MstrWriter",
    "MultReader",
    "MultWriter",
    "Payload",
    "SampleIds",
    "VerifyReport",
    "WriteSummary",
    "add_stream",
    "convert",
    "crc32c",
    "crc32c_each",
    "name_hash",
    "open_reader",
    "write_mstr",
]
