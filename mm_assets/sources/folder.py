"""A folder of plain files, without any container: each file directly in it is a member, with its name.

The file of such a shard is a listing of the folder (see `mm_assets.storage.listing.describe_folder`), so that its
members are listed by one request. The content of a member is read from its own file.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import ClassVar
from urllib.parse import quote

from mm_assets.errors import ShardError, SourceError
from mm_assets.sources.member import MODALITY_OF_EXTENSION, Member, OnDamage, ShardDamage, named_member
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import FOLDER_MAGIC
from mm_assets.storage.urls import is_local, is_web

__all__ = ["FolderSource", "file_url"]

_DOCUMENTS = frozenset({b"readme", b"license", b"licence", b"notice", b"changelog", b"citation"})
_SIDE_CARS = frozenset({"csv", "json", "yaml", "yml", "cls"})  # alone they make no sample
_REQUESTS = 16  # files of a remote folder that are read at a time


class FolderSource:
    """The files directly in a folder; see `mm_assets.sources.base.Source`.

    Attributes:
        FILES: ends of names, in lower case: a folder with such a file is a shard, if nothing else is one.
    """

    SUFFIXES: ClassVar[tuple[str, ...]] = ("/",)
    FILES: ClassVar[tuple[str, ...]] = tuple(f".{extension}" for extension in MODALITY_OF_EXTENSION.keys() - _SIDE_CARS)
    seekable = True

    def __init__(self, file: SourceFile) -> None:
        self.file = file

    @classmethod
    def accepts(cls, head: bytes) -> bool:
        """Returns whether the bytes start a listing, which only a folder has: `members` refuses any other file."""
        return head.startswith(FOLDER_MAGIC)

    def members(
        self, *, on_damaged_shard: OnDamage = "fail", damage: list[ShardDamage] | None = None
    ) -> Iterator[Member]:
        """Yields the files, without folders; there is no damage. Arguments and errors as `Source.members`."""
        url = self.file.url
        if not url.endswith("/"):
            raise ShardError(url, "is a file with the bytes of a folder's listing, expected a folder", byte_offset=0)
        with self.file.stream() as lines:
            for ordinal, line in enumerate(islice(lines, 1, None)):
                name, size = json.loads(line)[:2]
                raw = name.encode("utf-8", "surrogateescape")
                is_document = raw.partition(b".")[0].lower() in _DOCUMENTS
                reason = "documentation" if is_document else None
                yield named_member(url, raw, ordinal=ordinal, byte_size=size, skip_reason=reason)

    def payloads(
        self,
        *,
        wanted: Callable[[Member], bool],
        max_bytes: int,
        on_error: Callable[[Member, SourceError], None] | None = None,
        on_damaged_shard: OnDamage = "fail",
        damage: list[ShardDamage] | None = None,
    ) -> Iterator[tuple[Member, bytes]]:
        """Yields chosen files with their content, several remote ones at a time; arguments as `Source.payloads`."""
        requests = 1 if is_local(self.file.url) else _REQUESTS
        chosen = filter(wanted, self.members())
        waiting: deque[tuple[Member, Future[bytes]]] = deque()
        with ThreadPoolExecutor(requests, thread_name_prefix="folder") as pool:
            try:
                while True:
                    for member in islice(chosen, requests - len(waiting)):
                        waiting.append((member, pool.submit(self._content, member, max_bytes)))
                    if not waiting:
                        return
                    member, content = waiting.popleft()
                    try:
                        payload = content.result()
                    except SourceError as error:
                        if on_error is None:
                            raise
                        on_error(member, error)
                    else:
                        yield member, payload
            finally:
                for _, content in waiting:
                    content.cancel()

    def _content(self, member: Member, max_bytes: int) -> bytes:
        name, size = member.member, member.byte_size
        if size > max_bytes:
            raise SourceError(self.file.url, f"holds {size} bytes, allowed are {max_bytes}", member=name)
        with self.file.beside(name) as file:
            if file.size != size:
                detail = f"holds {file.size} bytes, it had {size} when the folder was listed: run this again"
                raise SourceError(self.file.url, detail, member=name)
            return file.read(0, size)


def file_url(folder: str, member: str) -> str:
    """Returns the path or URL of a member's own file.

    Args:
        folder: URL of the folder, with a slash at its end.
        member: its name.
    """
    return folder + (quote(member) if is_web(folder) else member)
