"""HDF5 files of robot episodes, as robomimic, LIBERO, ManiSkill and ALOHA write them: datasets are members.

Each group of ``data/``, or each numbered group of the root, is a sample; without such groups the file is one. A dataset
``obs/joint_pos`` of ``data/demo_0`` in ``lift.hdf5`` is the member ``lift/demo_0.obs.joint_pos.npy``. Pictures are
numbered members: encoded ones as they are, arrays (T, H, W, channels) as PNG that is not compressed. Its size follows
from the shape, so that listing reads no pixel, and training reads single frames of a stack. Attributes, texts and
single numbers are the JSON.

Nothing in the file is trusted. Only hard links are followed, and each group once; nothing opens another file or loads a
filter. A dataset that is not read is an entry with the reason.
"""

from __future__ import annotations

import io
import math
import posixpath
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mm_assets.errors import ShardError, SourceError, first_line, optional_import
from mm_assets.media.content_types import extension_of_content_type, sniff_content_type
from mm_assets.sources.arrays import is_picture, npy_bytes, npy_size, png_bytes, png_size
from mm_assets.sources.entries import Entry, EntrySource, Scan, named_entry, number_entries
from mm_assets.sources.head import HEAD_BYTES, format_error
from mm_assets.sources.member import Member, escape_part
from mm_assets.sources.row_members import dump_values
from mm_assets.storage.files import SourceFile

if TYPE_CHECKING:
    import h5py

__all__ = ["HDF5Source"]

MAGIC = b"\x89HDF\r\n\x1a\n"
_HEAP_MAGIC = b"GCOL"
MAX_DEPTH = 16  # groups within each other
MAX_OBJECTS = 1 << 20  # groups and datasets of a file
MAX_FRAMES = 1 << 18  # pictures of a dataset
MAX_ENTRIES = 1 << 22  # of a file: a dataset that was never written takes no bytes
MAX_TEXTS = 1 << 16  # of a dataset or an attribute
MAX_JSON_BYTES = 16 << 20  # of the texts and attributes of a sample
BLOCK_BYTES = 16 << 20  # of pictures that are read at a time, and at least a chunk of the file
MAX_CHUNK_BYTES = 1 << 30  # that are unpacked at a time
MAX_HEAP_BYTES = 64 << 20  # of texts and bytes that the file has in one place
BUFFER_BYTES = 64 << 10  # of the file that are read at a time
REMOTE_BUFFER_BYTES = 1 << 20

_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}
_NUMBERED_GROUP = re.compile(r"(?:demo|traj|trajectory|episode|ep)?_?\d+")
_DIGITS = re.compile(r"(\d+)")
_ENCODED = ("image/jpeg", "image/png", "image/webp")
_ERRORS = (OSError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
"""What h5py raises for damaged files, and for values that Python does not have."""


class _SkippedError(ValueError):
    """Why a dataset is not read."""


class HDF5Source(EntrySource):
    """An HDF5 file as a container; see `mm_assets.sources.base.Source`.

    "salvage" continues at the next episode.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = (".hdf5", ".h5")
    seekable = False
    text_encoding = "utf-8"

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Returns whether a file that starts with `head` is an HDF5 file."""
        return head.startswith(MAGIC)

    def _entries(self, scan: Scan) -> Iterator[Entry]:
        with optional_import("h5py", "reading HDF5 files"):
            import h5py
        head = self.file.read(0, min(HEAD_BYTES, self.file.size))
        if not self.accepts(head):
            raise format_error(self.file.url, head, "an HDF5 file")
        sizes = head[13:15] if head[8:9] < b"\2" else head[9:11]  # of addresses and lengths, by the version before them
        if sizes != b"\x08\x08":
            detail = f"has addresses and lengths of {', '.join(map(str, sizes))} bytes, expected 8 and 8"
            raise ShardError(self.file.url, detail, byte_offset=0)
        raw = _Raw(self.file)
        try:
            file = h5py.File(raw, "r")
        except _ERRORS as error:
            raw.check()
            detail = f"cannot be opened: {first_line(error)}; write or download the file again"
            raise ShardError(self.file.url, detail, byte_offset=0) from error
        with closing(file):
            for entry in number_entries(self._episodes(_Reader(self.file.url, file, scan.max_bytes), raw, scan)):
                member, content = entry
                if member.ordinal == MAX_ENTRIES:
                    raise ShardError(self.file.url, f"has more than {MAX_ENTRIES:,} members", byte_offset=0)
                yield entry if content is None else Entry(member, partial(self._read, raw, member, content))

    def _episodes(self, reader: _Reader, raw: _Raw, scan: Scan) -> Iterator[Entry]:
        """Yields the entries of the episodes."""
        try:
            episodes = reader.episodes()
        except _ERRORS as error:
            raw.check()
            detail = f"its groups cannot be read: {first_line(error)}"
            raise ShardError(self.file.url, detail, byte_offset=0) from error
        for name, entries in episodes:
            try:
                yield from entries
            except _ERRORS as error:
                raw.check()
                detail = f"group {name!a} cannot be read: {first_line(error)}"
                scan.salvage(self.file.url, detail, byte_offset=0, byte_size=0)
                yield named_entry(self.file.url, name or "/", skip_reason=f"damaged: {detail}")

    def _read(self, raw: _Raw, member: Member, content: Callable[[], bytes]) -> bytes:
        """Returns the content of a member; raises the errors of h5py as `SourceError`."""
        try:
            return content()
        except (_SkippedError, *_ERRORS) as error:
            raw.check()
            raise SourceError(self.file.url, f"cannot be read: {first_line(error)}", member=member.member) from error


class _Raw(io.RawIOBase):
    """The file for h5py, which hides errors of the storage: `check` raises them.

    libhdf5 reads lists of texts and of bytes out of heaps, and does not return from one in which an entry has no size.
    So heaps are checked when they are read.
    """

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._stream = io.BufferedReader(file.open(), BUFFER_BYTES if file.is_local else REMOTE_BUFFER_BYTES)
        self._failure: SourceError | None = None
        self._checked_heaps: set[int] = set()  # by position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def readinto(self, buffer: Any) -> int:
        try:
            at = self._stream.tell()
            size = self._stream.readinto(buffer)
            if at not in self._checked_heaps and bytes(memoryview(buffer)[:4]) == _HEAP_MAGIC:
                self._check_heap(at)
        except SourceError as error:
            self._failure = error
            raise OSError(str(error)) from error
        return size

    def _check_heap(self, at: int) -> None:
        size = int.from_bytes(self._file.read(at + 8, min(8, self._file.size - at - 8)), "little")
        if size > min(MAX_HEAP_BYTES, self._file.size - at):
            raise OSError(f"a heap at byte {at} has {size:,} bytes, which is more than the file has, or than is read")
        heap = self._file.read(at, size)
        place = 16
        while place + 16 <= size:
            index, length = (
                int.from_bytes(heap[place : place + 2], "little"),
                int.from_bytes(heap[place + 8 : place + 16], "little"),
            )
            step = 16 + -(-length // 8) * 8 if index else length
            if not 16 <= step <= size - place:
                raise OSError(f"a heap at byte {at} has an entry of {length:,} bytes at {place}")
            place += step
        self._checked_heaps.add(at)

    def check(self) -> None:
        """Raises the error of the storage, if there was one."""
        if self._failure is not None:
            raise self._failure


class _Reader:
    """Lists the datasets of an open file.

    Args:
        url: the file.
        file: the open file.
        max_bytes: the size of the largest content that is read.
    """

    def __init__(self, url: str, file: h5py.File, max_bytes: int) -> None:
        self._url = url
        self._file = file
        self._max_bytes = max_bytes
        base = posixpath.basename(url)
        suffix = next((end for end in HDF5Source.SUFFIXES if base.lower().endswith(end)), "")
        self._base = escape_part(base[: len(base) - len(suffix)])
        self._visited: set[int] = set()  # addresses of groups
        self._masks: dict[str, list[str]] = {}
        self._num_objects = 0

    def episodes(self) -> list[tuple[str, Iterator[Entry]]]:
        """Returns the group of each episode and its entries; ``/`` for the file, and for what is beside the groups."""
        parent = "data" if "data" in self._file and (names := self._episode_groups("data")) else ""
        names = names if parent else self._episode_groups("")
        for name in ("/", parent or "/", *names):
            self._visited.add(_address(self._file[name]))
        if not names:
            return [("/", self._episode("/", self._base))]
        episodes = [
            (name, self._episode(name, f"{self._base}/{escape_part(posixpath.basename(name))}")) for name in names
        ]
        return [*episodes, ("/", self._beside({parent, *names}))]

    def _episode_groups(self, parent: str) -> list[str]:
        """Returns the paths of the episodes in a group, in their order."""
        import h5py

        group = self._child(self._file, parent) if parent else self._file
        if not isinstance(group, h5py.Group):
            return []
        names = [name for name in group if isinstance(self._child(group, name), h5py.Group)]
        if not parent:
            names = [name for name in names if _NUMBERED_GROUP.fullmatch(name)]
        return [posixpath.join(parent, name) for name in sorted(names, key=_natural)]

    def _beside(self, episodes: set[str]) -> Iterator[Entry]:
        """Yields entries for what the root has beside the episodes."""
        for name in sorted(set(self._file) - episodes):
            if name != "mask" or not self._masks:
                yield self._skipped_entry(
                    f"{self._base}/{escape_part(name)}", "is beside the episodes, and part of none"
                )

    def _skipped_entry(self, name: str, reason: str) -> Entry:
        return named_entry(self._url, name, skip_reason=reason)

    def _child(self, group: h5py.Group, name: str) -> h5py.Group | h5py.Dataset | h5py.Datatype | None:
        """Returns what a hard link leads to; None for other links, which may lead to another file or in a circle."""
        import h5py

        link = group.get(name, getlink=True)
        return group[name] if isinstance(link, h5py.HardLink) else None

    def _episode(self, path: str, key: str) -> Iterator[Entry]:
        import h5py

        group = self._file[path]
        values: dict[str, Any] = {}
        for parent in ("/", posixpath.dirname(path) or "/", path):
            values |= _attributes(self._file[parent])
        if path != "/":
            values["episode"] = name = posixpath.basename(path)
            self._masks = self._masks or self._read_masks()
            masks = [mask for mask, episodes in self._masks.items() if name in episodes]
            values |= {"mask": masks} if masks else {}
        inner: dict[str, Any] = {}
        entries: list[Iterator[Entry]] = []
        for place, child in self._walk(group, "", 0):
            role = ".".join(map(escape_part, place.split("/")))
            if isinstance(child, str):
                entries.append(iter([self._skipped_entry(f"{key}.{role}", child)]))
                continue
            attributes = _attributes(child)
            inner |= {role: attributes} if attributes else {}
            if not isinstance(child, h5py.Dataset):
                continue
            try:
                _check(child)
                if _is_value(child):
                    values[role] = _value(child)
                else:
                    entries.append(self._dataset(f"{key}.{role}", child))
            except _SkippedError as reason:
                entries.append(iter([self._skipped_entry(f"{key}.{role}", str(reason))]))
        values |= {"attributes": inner} if inner else {}
        content = dump_values(values).encode()
        if len(content) > MAX_JSON_BYTES:
            yield self._skipped_entry(
                f"{key}.json", f"its attributes and texts take more than {MAX_JSON_BYTES:,} bytes"
            )
        else:
            yield named_entry(self._url, f"{key}.json", len(content), lambda: content)
        for each in entries:
            yield from each

    def _read_masks(self) -> dict[str, list[str]]:
        """Returns the lists of episodes in ``mask/``, as robomimic has them for training and validation."""
        import h5py

        group = self._child(self._file, "mask") if "mask" in self._file else None
        if not isinstance(group, h5py.Group):
            return {}
        masks: dict[str, list[str]] = {}
        for name in sorted(group):
            names = self._child(group, name)
            if isinstance(names, h5py.Dataset) and names.ndim == 1:
                _check(names)
                masks |= {name: _value(names)} if h5py.check_string_dtype(names.dtype) else {}
        return masks

    def _walk(self, group: h5py.Group, place: str, depth: int) -> Iterator[tuple[str, h5py.Group | h5py.Dataset | str]]:
        """Yields everything below a group with its path, or the reason why it is not read."""
        import h5py

        for name in sorted(group, key=_natural):
            below = posixpath.join(place, name)
            self._num_objects += 1
            if self._num_objects > MAX_OBJECTS:
                raise ValueError(f"has more than {MAX_OBJECTS:,} objects")
            child = self._child(group, name)
            if child is None:
                kind = type(group.get(name, getlink=True)).__name__
                yield below, f"is a link ({kind}) and not followed: copy what it leads to into the file"
            elif isinstance(child, h5py.Dataset):
                yield below, child
            elif isinstance(child, h5py.Group):
                address = _address(child)
                if depth >= MAX_DEPTH or address in self._visited:
                    yield below, "is a group that was listed before, or is too deep in others"
                    continue
                self._visited.add(address)
                yield below, child
                yield from self._walk(child, below, depth + 1)

    # -- datasets

    def _dataset(self, name: str, data: h5py.Dataset) -> Iterator[Entry]:
        try:
            extension = _encoded_extension(data)
        except _SkippedError as reason:
            yield self._skipped_entry(name, str(reason))
            return
        if extension is not None:
            for frame in range(len(data)):
                size = len(_encoded_row(data, frame))
                yield named_entry(self._url, f"{name}.{frame}.{extension}", size, partial(_encoded_row, data, frame))
            return
        is_depth = data.ndim == 3 and data.dtype.kind == "u" and "depth" in name.rpartition(".")[2].lower()
        if (data.ndim == 4 or is_depth) and is_picture(data.dtype, data.shape[1:]) and len(data) <= MAX_FRAMES:
            size = png_size(data.dtype, data.shape[1:])
            frames = _Frames(data, self._max_bytes)
            for frame in range(len(data)):
                yield named_entry(self._url, f"{name}.{frame}.png", size, partial(frames.png, frame))
            return
        if data.dtype.kind not in "biufc":
            yield self._skipped_entry(name, f"has the type {data.dtype}, expected numbers, texts or encoded pictures")
            return
        yield named_entry(
            self._url, f"{name}.npy", npy_size(data.dtype, data.shape), partial(_npy, data, self._max_bytes)
        )


class _Frames:
    """Encodes the frames of a dataset, and keeps the pixels of a few chunks in memory.

    Args:
        data: the dataset.
        max_bytes: the size of the largest content that is read.
    """

    def __init__(self, data: h5py.Dataset, max_bytes: int) -> None:
        self._data = data
        self._limit = max(max_bytes, BLOCK_BYTES)
        self._start = 0
        self._block: np.ndarray[Any, np.dtype[Any]] | None = None

    def png(self, frame: int) -> bytes:
        """Returns a frame as PNG; raises `_SkippedError` if its chunk is larger than what may be read."""
        if self._block is None or not self._start <= frame < self._start + len(self._block):
            chunk = self._data.chunks[0] if self._data.chunks else 1
            _check_chunk(self._data, self._limit)
            frame_bytes = max(math.prod(self._data.shape[1:]) * self._data.dtype.itemsize, 1)
            step = max(chunk, BLOCK_BYTES // frame_bytes // chunk * chunk)
            step = max(min(step, self._limit // frame_bytes), 1)
            self._start = frame // step * step
            self._block = self._data[self._start : self._start + step]
        return png_bytes(self._block[frame - self._start])


def _check(data: h5py.Dataset) -> None:
    """Raises `_SkippedError` for a dataset that is not in the file, or needs other files or code to be read."""
    import h5py

    if data.is_virtual:
        raise _SkippedError("is a virtual dataset, whose data is in other files: copy them into one")
    if data.external:
        raise _SkippedError("has its data in another file: copy it into this one")
    if h5py.check_ref_dtype(data.dtype) is not None:
        raise _SkippedError("holds references to other objects, which are not followed")
    plist = data.id.get_create_plist()
    for number in range(plist.get_nfilters()):
        code, _, _, label = plist.get_filter(number)
        if code not in _FILTERS:
            title = label.decode(errors="replace").split("\0")[0][:40]
            filters = ", ".join(_FILTERS.values())
            raise _SkippedError(
                f"is compressed by the plugin filter {code} ({title!a}), expected one of {filters}: write it again"
            )
    stored = data.id.get_num_chunks() * math.prod(data.chunks) if data.chunks else data.id.get_storage_size()
    expected = data.size if data.chunks else data.nbytes
    if data.shape is not None and stored < expected:
        unit = "values" if data.chunks else "bytes"
        raise _SkippedError(f"has {expected:,} {unit}, but the file holds at most {stored:,}: write it again")


def _check_chunk(data: h5py.Dataset, max_bytes: int) -> None:
    size = math.prod(data.chunks or ()) * data.dtype.itemsize
    if data.chunks and size > min(max_bytes, MAX_CHUNK_BYTES):
        raise _SkippedError(f"has chunks of {size:,} bytes, allowed are {min(max_bytes, MAX_CHUNK_BYTES):,}")


def _npy(data: h5py.Dataset, max_bytes: int) -> bytes:
    """Returns all values of a dataset as NPY."""
    _check_chunk(data, max_bytes)
    return npy_bytes(np.asarray(data[()]))


def _address(group: h5py.Group) -> int:
    """Returns what identifies an object of a file, whatever links lead to it."""
    import h5py

    address: int = h5py.h5o.get_info(group.id).addr
    return address


def _is_value(data: h5py.Dataset) -> bool:
    """Returns whether a dataset is a value of the JSON: texts, or a single number."""
    import h5py

    if h5py.check_string_dtype(data.dtype) is not None:
        return _encoded_extension(data) is None
    return data.shape == () and data.dtype.kind in "biuf"


def _value(data: h5py.Dataset) -> Any:
    if data.shape is None:
        return None
    if data.shape == ():
        return _plain(data[()])
    if data.size > MAX_TEXTS or data.dtype.itemsize * data.size > MAX_JSON_BYTES:
        raise _SkippedError(f"has {data.size:,} texts of {data.dtype.itemsize} bytes, at most {MAX_TEXTS:,} are read")
    texts, size = [], 0
    for place in np.ndindex(data.shape):  # one at a time: each may be the same long text in the file
        texts.append(_plain(data[place]))
        size += len(str(texts[-1]))
        if size > MAX_JSON_BYTES:
            raise _SkippedError(f"has texts of more than {MAX_JSON_BYTES:,} bytes")
    return np.array(texts, object).reshape(data.shape).tolist()


def _attributes(node: h5py.Group | h5py.Dataset) -> dict[str, Any]:
    """Returns the attributes of an object: texts, numbers and short arrays of them; a note instead of any other."""
    import h5py

    values: dict[str, Any] = {}
    for name in sorted(node.attrs):
        attribute = node.attrs.get_id(name)
        is_text = h5py.check_string_dtype(attribute.dtype) is not None
        size = math.prod(attribute.shape or ())
        is_large = size > MAX_TEXTS or size * attribute.dtype.itemsize > MAX_JSON_BYTES
        if attribute.shape is None or not (is_text or attribute.dtype.kind in "biuf") or is_large:
            values[name] = f"<{attribute.dtype}, {attribute.shape}: not read>"
            continue
        value = node.attrs[name]
        values[name] = [_plain(item) for item in value.ravel()] if isinstance(value, np.ndarray) else _plain(value)
    return values


def _plain(value: Any) -> Any:
    """Returns a text or number as Python has it."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode(errors="replace")
    return value.item() if isinstance(value, np.generic) else value


# -- encoded pictures: rows of bytes


def _encoded_extension(data: h5py.Dataset) -> str | None:
    """Returns the extension of the encoded pictures in the rows of a dataset; None if it holds something else."""
    import h5py

    is_rows = data.ndim == 2 and data.dtype == np.uint8
    is_list = data.ndim == 1 and (data.dtype.kind in "SV" or h5py.check_vlen_dtype(data.dtype) == np.uint8)
    if not (is_rows or is_list) or not len(data) or len(data) > MAX_FRAMES or data.dtype.itemsize > MAX_CHUNK_BYTES:
        return None
    _check(data)
    _check_chunk(data, MAX_CHUNK_BYTES)
    content_type = sniff_content_type(_encoded_row(data, 0)[:HEAD_BYTES])
    return extension_of_content_type(content_type) if content_type in _ENCODED else None


def _encoded_row(data: h5py.Dataset, row: int) -> bytes:
    """Returns the bytes of a row, without the zeros that fill it up: no picture ends with one."""
    return np.asarray(data[row]).tobytes().rstrip(b"\0")


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a key that sorts numbers in names by their values."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name) if part]
