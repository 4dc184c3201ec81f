"""An S3 server for very many small objects, in a process of its own, that answers after a pause and counts requests.

It holds objects in memory. Only one partition's files are stored: a read of any other partition replaces the names in
them, so that a million objects fit. It knows the requests of s3fs: objects, ranges, conditional
uploads, uploads in parts, deletions of many, listings by pages of 1,000.

    POST /_clone  {"prefixes": [...], "old": [TEXT, ...], "to": [[TEXT, ...], ...]}  copies objects under other names
    POST /_age    {"seconds": ...}  makes all objects older
    GET  /_log    method and path of each request since the last call
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import subprocess
import sys
import time
import urllib.request
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Any
from xml.sax.saxutils import escape, unescape

PAGE = 1000  # keys, as S3 lists them


@dataclass(slots=True)
class Object:
    """An object, which may be made from another one.

    Attributes:
        content: of the object, or of the one that it is made from.
        modified: when it was written, in seconds since 1970.
        names: texts to replace in that content, and by what; each as long as the other.
    """

    content: bytes
    modified: float
    names: tuple[tuple[str, str], ...] = ()

    @property
    def etag(self) -> str:
        """Its tag; an object made from another one has the same."""
        return f'"{hashlib.md5(self.content, usedforsecurity=False).hexdigest()}"'

    def read(self) -> bytes:
        """Returns its own content."""
        content = self.content
        for old, new in self.names:
            content = content.replace(old.encode(), new.encode())
        return content


class Bucket:
    """The objects of the server, by bucket and key, sorted."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self._names: list[str] = []

    def put(self, name: str, found: Object) -> None:
        """Stores an object."""
        if name not in self.objects:
            insort(self._names, name)
        self.objects[name] = found

    def put_all(self, found: Mapping[str, Object]) -> None:
        """Stores many."""
        if len(found) < PAGE:
            for name, new in found.items():
                self.put(name, new)
            return
        self.objects.update(found)
        self._names = sorted(self.objects)

    def delete_all(self, names: Collection[str]) -> None:
        """Removes many."""
        for name in names:
            self.objects.pop(name, None)
        if len(names) < 10:
            for name in names:
                at = bisect_left(self._names, name)
                del self._names[at : at + (at < len(self._names) and self._names[at] == name)]
            return
        low, high = bisect_left(self._names, min(names)), bisect_right(self._names, max(names))
        self._names[low:high] = [name for name in self._names[low:high] if name in self.objects]

    def listed(self, prefix: str, delimiter: str, after: str, most: int) -> tuple[list[str], list[str], str]:
        """Names and common prefixes after a name, and the name to continue after, or an empty one at the end."""
        names: list[str] = []
        prefixes: list[str] = []
        at = bisect_left(self._names, max(prefix, after))
        last = ""
        while at < len(self._names) and len(names) + len(prefixes) < most:
            name = self._names[at]
            if not name.startswith(prefix):
                return names, prefixes, ""
            if name == after:
                at += 1
                continue
            end = name.find(delimiter, len(prefix)) if delimiter else -1
            if end >= 0:
                folder = name[: end + len(delimiter)]
                last = folder + "\U0010ffff"  # past all that are in it
                at = bisect_left(self._names, last)
                prefixes.append(folder)
                continue
            names.append(name)
            last = name
            at += 1
        is_more = at < len(self._names) and self._names[at].startswith(prefix)
        return names, prefixes, last if is_more else ""


class Server:
    """What answers requests.

    Args:
        delay: seconds that each answer takes at least.
    """

    def __init__(self, delay: float) -> None:
        from aiohttp import web

        self._web = web
        self._delay = delay
        self._bucket = Bucket()
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._log: list[str] = []

    async def answer(self, request: Any) -> Any:
        """The answer to any request."""
        body = await request.read()
        if request.path == "/_clone":
            return self._web.json_response(self._clone(**json.loads(body)))
        if request.path == "/_age":
            for one in self._bucket.objects.values():
                one.modified -= json.loads(body)["seconds"]
            return self._web.json_response(None)
        if request.path == "/_log":
            log, self._log = self._log, []
            return self._web.json_response(log)
        began = time.monotonic()
        name, query = request.path.lstrip("/"), request.query
        is_bucket = "/" not in name.rstrip("/")
        kind = "LIST" if request.method == "GET" and is_bucket else request.method
        status, headers, content = self._answered(request, kind, name, query, body)
        await asyncio.sleep(max(began + self._delay - time.monotonic(), 0))
        self._log.append(f"{kind} {query.get('prefix', '') if kind == 'LIST' else name}")
        if request.method == "HEAD":
            answer = self._web.StreamResponse(status=status, headers=headers)
            answer.content_length = int(headers.get("X-Length", "0"))
            await answer.prepare(request)
            return answer
        return self._web.Response(status=status, headers=headers, body=content)

    def _answered(
        self, request: Any, kind: str, name: str, query: Mapping[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        found = self._bucket.objects.get(name)
        if kind == "LIST":
            return self._listing(name.strip("/"), query)
        if kind in ("GET", "HEAD"):
            if found is None:
                is_bucket = "/" not in name.rstrip("/")
                return (200, {}, b"") if is_bucket else _error(404, "NoSuchKey")
            content = found.read()
            modified = formatdate(found.modified, usegmt=True)
            headers = {"ETag": found.etag, "Last-Modified": modified, "Content-Type": "binary/octet-stream"}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
            if wanted and kind == "GET":
                end = min(int(wanted[2]) + 1, len(content)) if wanted[2] else len(content)
                headers["Content-Range"] = f"bytes {wanted[1]}-{end - 1}/{len(content)}"
                return 206, headers, content[int(wanted[1]) : end]
            return 200, {**headers, "X-Length": str(len(content))}, content
        if kind == "DELETE":
            self._bucket.delete_all([name])
            return 204, {}, b""
        if kind == "POST":
            return self._posted(name, query, body)
        if "partNumber" in query:
            self._uploads[query["uploadId"]][int(query["partNumber"])] = body
            return 200, {"ETag": Object(body, 0.0).etag}, b""
        wanted_tag, is_new = request.headers.get("If-Match"), request.headers.get("If-None-Match") == "*"
        if (is_new and found is not None) or (wanted_tag and (found is None or found.etag != wanted_tag)):
            return _error(412, "PreconditionFailed")
        new = Object(body, time.time())
        if "/" in name:
            self._bucket.put(name, new)
        return 200, {"ETag": new.etag}, b""

    def _posted(self, name: str, query: Mapping[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if "uploads" in query:
            number = f"upload{len(self._uploads)}"
            self._uploads[number] = {}
            return 200, {}, _xml("InitiateMultipartUploadResult", f"<UploadId>{number}</UploadId>")
        if "uploadId" in query:
            parts = self._uploads.pop(query["uploadId"])
            whole = Object(b"".join(parts[number] for number in sorted(parts)), time.time())
            self._bucket.put(name, whole)
            return 200, {}, _xml("CompleteMultipartUploadResult", f"<ETag>{escape(whole.etag)}</ETag>")
        keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
        self._bucket.delete_all([f"{name.strip('/')}/{unescape(key)}" for key in keys])
        return 200, {}, _xml("DeleteResult", "")

    def _listing(self, bucket: str, query: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        after = query.get("continuation-token", query.get("start-after", ""))
        names, prefixes, more = self._bucket.listed(
            f"{bucket}/{query.get('prefix', '')}",
            query.get("delimiter", ""),
            f"{bucket}/{after}" if after else "",
            min(int(query.get("max-keys", PAGE)), PAGE),
        )
        cut = len(bucket) + 1
        rows = []
        for name in names:
            one = self._bucket.objects[name]
            modified = datetime.fromtimestamp(one.modified, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
            rows.append(
                f"<Contents><Key>{escape(name[cut:])}</Key><LastModified>{modified}</LastModified>"
                f"<ETag>{escape(one.etag)}</ETag><Size>{len(one.content)}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        folders = [f"<CommonPrefixes><Prefix>{escape(name[cut:])}</Prefix></CommonPrefixes>" for name in prefixes]
        token = f"<NextContinuationToken>{escape(more[cut:])}</NextContinuationToken>" if more else ""
        head = f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated><KeyCount>{len(rows) + len(folders)}</KeyCount>"
        return 200, {}, _xml("ListBucketResult", f"{head}{token}{''.join(rows)}{''.join(folders)}")

    def _clone(self, prefixes: list[str], old: list[str], to: list[list[str]]) -> int:
        """Copies the objects below prefixes whose name has the first of some texts, with other texts in their place."""
        originals = {
            name: one
            for name, one in self._bucket.objects.items()
            if name.startswith(tuple(prefixes)) and old[0] in name and not one.names
        }
        made: dict[str, Object] = {}
        for new in to:
            names = tuple(zip(old, new, strict=True))
            for name, one in originals.items():
                for before, after in names:
                    name = name.replace(before, after)
                made[name] = Object(one.content, time.time(), names)
        self._bucket.put_all(made)
        return len(made)


def _error(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    return status, {}, _xml("Error", f"<Code>{code}</Code><Message>{code}</Message>")


def _xml(name: str, content: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{name}>{content}</{name}>'.encode()


@dataclass(frozen=True)
class Service:
    """A running server.

    Attributes:
        url: its address.
    """

    url: str

    def log(self) -> list[str]:
        """Returns the method and path of each request since the last call; of a listing its prefix."""
        with urllib.request.urlopen(f"{self.url}/_log", timeout=60) as answer:
            log: list[str] = json.load(answer)
        return log

    def post(self, action: str, **arguments: Any) -> None:
        """Has the server `_clone` or `_age` its objects."""
        request = urllib.request.Request(f"{self.url}/{action}", json.dumps(arguments).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=600) as answer:
            answer.read()


@contextmanager
def serve(delay: float) -> Iterator[Service]:
    """Starts a server on a free port of the loopback address.

    Args:
        delay: seconds that each answer takes at least.
    """
    command = [sys.executable, "-m", __name__, "--delay", str(delay)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Service(process.stdout.readline().strip())
        finally:
            process.terminate()


def main() -> None:
    """Serves until it is ended; prints the address first."""
    from aiohttp import web

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.02, help="seconds that each answer takes at least")
    arguments = parser.parse_args()

    async def run() -> None:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{name:.*}", Server(arguments.delay).answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        assert site._server is not None
        print(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", flush=True)  # type: ignore[attr-defined]
        while True:
            await asyncio.sleep(3600)

    asyncio.run(run())


if __name__ == "__main__":
    main()
