"""An S3 server for very many small objects, in a process of its own, that answers after a pause and counts.

It holds objects in memory. The files of a partition are stored once: those of the others differ in the key of the
partition alone, and are made from it when they are read, so that a million objects fit. It knows what s3fs asks for:
objects, ranges, conditional uploads, uploads in parts, listings by pages of 1,000.

    POST /_clone     {"from": KEY, "keys": [...], "markers": {KEY: NAME}, "bucket": ..., "folders": [...]}
    GET  /_requests  the requests since the last call, by method and kind, with bytes in and out
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
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

PAGE = 1000  # keys, as S3 lists them
_MODIFIED = "2026-01-01T00:00:00.000Z"
_MODIFIED_HTTP = "Thu, 01 Jan 2026 00:00:00 GMT"


@dataclass(slots=True)
class Object:
    """An object: its content, or that of another partition's from which it is made.

    Attributes:
        content: of the object, or of the one that it is made from.
        key: of the partition, where it is made from another's.
        of: that other partition's key.
        digests: SHA-256 of texts that the content names, by that of the other's, which a marker has of its records.
    """

    content: bytes
    key: str = ""
    of: str = ""
    digests: tuple[str, str] = ("", "")

    @property
    def etag(self) -> str:
        """Its tag: equal for equal contents."""
        return f'"{hashlib.md5(self.read(), usedforsecurity=False).hexdigest()}"' if not self.key else f'"{self._tag}"'

    @property
    def _tag(self) -> str:
        return hashlib.md5(f"{self.key} {len(self.content)}".encode(), usedforsecurity=False).hexdigest()

    def read(self) -> bytes:
        """The content of its own."""
        if not self.key:
            return self.content
        old, new = self.digests
        changed = self.content.replace(old.encode(), new.encode()) if old else self.content
        return changed.replace(self.of.encode(), self.key.encode())


class Bucket:
    """The objects of the server, by bucket and key, sorted."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self._names: list[str] = []
        self._is_sorted = True

    def put(self, name: str, found: Object) -> None:
        """Stores an object."""
        if name not in self.objects:
            insort(self._names, name)
        self.objects[name] = found

    def put_all(self, found: Mapping[str, Object]) -> None:
        """Stores many."""
        self.objects.update(found)
        self._names = sorted(self.objects)

    def delete(self, name: str) -> None:
        """Removes an object, if it is there."""
        if self.objects.pop(name, None) is not None:
            del self._names[bisect_left(self._names, name)]

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
        self._requests: Counter[str] = Counter()

    async def answer(self, request: Any) -> Any:
        """The answer to any request."""
        body = await request.read()
        if request.path == "/_clone":
            return self._web.json_response(self._clone(json.loads(body)))
        if request.path == "/_requests":
            found, self._requests = self._requests, Counter()
            return self._web.json_response(found)
        began = time.monotonic()
        name, query = request.path.lstrip("/"), request.query
        kind = "LIST" if request.method == "GET" and "/" not in name.rstrip("/") else request.method
        status, headers, content = self._answered(request, kind, name, query, body)
        await asyncio.sleep(max(began + self._delay - time.monotonic(), 0))
        self._requests[kind] += 1
        self._requests["bytes in"] += len(body)
        self._requests["bytes out"] += 0 if request.method == "HEAD" else len(content)
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
            headers = {"ETag": found.etag, "Last-Modified": _MODIFIED_HTTP, "Content-Type": "binary/octet-stream"}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
            if wanted and kind == "GET":
                end = min(int(wanted[2]) + 1, len(content)) if wanted[2] else len(content)
                headers["Content-Range"] = f"bytes {wanted[1]}-{end - 1}/{len(content)}"
                return 206, headers, content[int(wanted[1]) : end]
            return 200, {**headers, "X-Length": str(len(content))}, content
        if kind == "DELETE":
            self._bucket.delete(name)
            return 204, {}, b""
        if kind == "POST":
            return self._posted(name, query, body)
        if "partNumber" in query:
            self._uploads[query["uploadId"]][int(query["partNumber"])] = body
            return 200, {"ETag": Object(body).etag}, b""
        wanted_tag, is_new = request.headers.get("If-Match"), request.headers.get("If-None-Match") == "*"
        if (is_new and found is not None) or (wanted_tag and (found is None or found.etag != wanted_tag)):
            return _error(412, "PreconditionFailed")
        if "/" in name:
            self._bucket.put(name, Object(body))
        return 200, {"ETag": Object(body).etag}, b""

    def _posted(self, name: str, query: Mapping[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if "uploads" in query:
            number = f"upload{len(self._uploads)}"
            self._uploads[number] = {}
            return 200, {}, _xml("InitiateMultipartUploadResult", f"<UploadId>{number}</UploadId>")
        if "uploadId" in query:
            parts = self._uploads.pop(query["uploadId"])
            made = Object(b"".join(parts[number] for number in sorted(parts)))
            self._bucket.put(name, made)
            return 200, {}, _xml("CompleteMultipartUploadResult", f"<ETag>{escape(made.etag)}</ETag>")
        for key in re.findall(r"<Key>(.*?)</Key>", body.decode()):
            self._bucket.delete(f"{name.strip('/')}/{key}")
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
        rows = [
            f"<Contents><Key>{escape(name[cut:])}</Key><LastModified>{_MODIFIED}</LastModified>"
            f"<ETag>{escape(self._bucket.objects[name].etag)}</ETag><Size>{len(self._bucket.objects[name].content)}"
            "</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for name in names
        ]
        folders = [f"<CommonPrefixes><Prefix>{escape(name[cut:])}</Prefix></CommonPrefixes>" for name in prefixes]
        token = f"<NextContinuationToken>{escape(more[cut:])}</NextContinuationToken>" if more else ""
        head = f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated><KeyCount>{len(rows) + len(folders)}</KeyCount>"
        return 200, {}, _xml("ListBucketResult", f"{head}{token}{''.join(rows)}{''.join(folders)}")

    def _clone(self, wanted: Mapping[str, Any]) -> int:
        """Makes the files of partitions from those of one; the size of the object is that of the other's."""
        first, markers = wanted["from"], wanted["markers"]
        folders = tuple(f"{folder}/" for folder in wanted["folders"])
        of_first = {
            name: found
            for name, found in self._bucket.objects.items()
            if name.startswith(folders) and first in name.rsplit("/", 1)[-1] and not found.key
        }
        record = next((found for name, found in of_first.items() if "/records/" in name), Object(b""))
        made: dict[str, Object] = {}
        for key in wanted["keys"]:
            digests = tuple(
                hashlib.sha256(record.content.replace(first.encode(), k.encode())).hexdigest() for k in (first, key)
            )
            for name, found in of_first.items():
                is_marker = "/published/" in name
                folder, _, base = name.rpartition("/")
                other = markers[key] if is_marker else base.replace(first, key)
                made[f"{folder}/{other}"] = Object(
                    content=found.content,
                    key=key,
                    of=first,
                    digests=digests if is_marker else ("", ""),  # type: ignore[arg-type]
                )
        if len(made) > PAGE:
            self._bucket.put_all(made)
        else:
            for name, new in made.items():
                self._bucket.put(name, new)
        return len(made)


def _error(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    return status, {}, _xml("Error", f"<Code>{code}</Code><Message>{code}</Message>")


def _xml(name: str, content: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{name}>{content}</{name}>'.encode()


@dataclass(frozen=True)
class Service:
    """A server at work.

    Attributes:
        url: its address.
    """

    url: str

    def requests(self) -> dict[str, int]:
        """The requests since the last call: a number for each kind, and bytes in and out."""
        with urllib.request.urlopen(f"{self.url}/_requests", timeout=60) as answer:
            found: dict[str, int] = json.load(answer)
        return found

    def clone(self, **wanted: Any) -> None:
        """Makes the files of partitions from those of one."""
        request = urllib.request.Request(f"{self.url}/_clone", json.dumps(wanted).encode(), method="POST")
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
