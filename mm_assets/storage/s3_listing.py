"""Requests to S3 that its client lacks: listings at the speed of the store, page by page, and a file with its tag.

The client's own parser takes most of the time of a page of 1,000 keys, and the client collects all pages before it
returns the first object, about 1 kB each. Only answers that list objects are parsed here, to what the client's parser
makes of them; it parses all others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from html import unescape
from itertools import pairwise
from typing import Any, cast
from weakref import WeakSet

__all__ = ["get_object", "list_objects", "listing_session", "use_fast_listings"]

_LISTING = "ListObjectsV2Output"
_ROOT = b"ListBucketResult"
_LOOKS_FOR_ERROR = "_handle_200_error"  # of the client's handlers
_HEAD = 200  # bytes in which the root begins
_RANGES = 8  # requests for pages at a time: each waits for the store most of its time
_PAGE = 1000  # objects
_FIELD = re.compile("<([A-Za-z]+)>([^<]*)</")  # of what is nested, the innermost, which `_PARSED` does not have
_PARSED: Mapping[str, Callable[[str], object]] = {
    "Key": str,
    "ETag": str,
    "StorageClass": str,
    "Size": int,
    "LastModified": datetime.fromisoformat,
    "ChecksumType": str,
    "ChecksumAlgorithm": lambda text: [text],
}


_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")
_CREDENTIAL_FILES = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}
_sessions: WeakSet[Any] = WeakSet()  # of `listing_session`


def use_fast_listings(fs: Any) -> None:
    """Lets a file system of s3fs use a session whose clients parse listings fast, with the credentials as they are now.

    A session that the caller gave stays.
    """
    if not fs.kwargs.keys() <= {"profile"}:  # of other arguments s3fs says that they are wrong
        return
    session = listing_session(fs.kwargs.get("profile"))
    if fs.session is None:
        fs.session = session
    elif fs.session is not session and fs.session in _sessions:
        fs.session, fs._s3 = session, None  # it connects again; requests at work keep their client


def list_objects(
    fs: Any,
    folder: str,
    *,
    prefix: str = "",
    is_recursive: bool = False,
    known: Sequence[str] = (),
    has_folders: bool = False,
) -> Iterator[dict[str, Any]]:
    """The objects in a folder, sorted by name, each as `ls` of the file system describes it.

    Args:
        fs: a file system of s3fs.
        folder: bucket and prefix.
        prefix: how the names in the folder begin.
        is_recursive: also those in folders below it.
        known: names that the folder had before, sorted, bucket included: where there are very many, the ranges between
            some of them are listed at the same time. New names are found whatever the known ones are.
        has_folders: also the folders in it, after the objects of their page.

    Yields:
        One page at a time is in memory, or with `known` all objects.

    Raises:
        FileNotFoundError: there is no such bucket.
    """
    bucket, path, _ = fs.split_path(folder)
    request = {"Bucket": bucket, "Prefix": f"{path.rstrip('/')}/{prefix}" if path else prefix, **fs.req_kw}
    if not is_recursive:
        request["Delimiter"] = "/"
    number = min(len(known) // _PAGE, _RANGES)
    if number < 2:
        yield from _objects_between(fs, request, "", None, has_folders=has_folders)
        return
    inner = [known[at * len(known) // number].partition("/")[2] for at in range(1, number)]
    bounds = ["", *sorted(set(inner)), None]
    with ThreadPoolExecutor(number, thread_name_prefix="ranges") as pool:
        # `list`: a generator would do its work in the thread that reads it.
        for found in pool.map(
            lambda bound: list(_objects_between(fs, request, *bound, has_folders=has_folders)), pairwise(bounds)
        ):
            yield from found


def _described(found: Mapping[str, Any], bucket: str) -> dict[str, Any]:
    name = f"{bucket}/{found['Key']}"
    return {**found, "Key": name, "name": name, "type": "file", "size": found["Size"]}


def _objects_between(
    fs: Any, request: Mapping[str, Any], after: str | None, until: str | None, *, has_folders: bool
) -> Iterator[dict[str, Any]]:
    """The objects whose keys are after one key, and up to another one or, without it, to the end."""
    bucket = request["Bucket"]
    more: dict[str, Any] = {"StartAfter": after} if after else {}
    while True:
        page = fs.call_s3("list_objects_v2", **request, **more)
        contents = page.get("Contents", [])
        for found in contents:
            if until is not None and found["Key"] > until:
                return
            yield _described(found, bucket)
        folders = page.get("CommonPrefixes", [])
        for found in folders if has_folders else ():
            yield {"name": f"{bucket}/{found['Prefix'].rstrip('/')}", "type": "directory", "size": 0}
        if not page.get("IsTruncated") or (until is not None and folders and folders[-1]["Prefix"] > until):
            return
        more = {"ContinuationToken": page["NextContinuationToken"]}


def get_object(fs: Any, **named: str) -> tuple[bytes, str]:
    """Returns the content of an object and its ETag, which are of one version, by one request.

    Args:
        fs: a file system of s3fs.
        named: `Bucket` and `Key`.

    Raises:
        FileNotFoundError: there is no such object.
    """
    from fsspec.asyn import sync  # asyncio is for remote files only
    from s3fs.core import S3_RETRYABLE_ERRORS

    async def get() -> tuple[bytes, str]:
        response = await fs._call_s3("get_object", **named, **fs.req_kw)
        try:
            return await response["Body"].read(), response["ETag"]
        finally:
            response["Body"].close()

    for _ in range(fs.retries - 1):
        with suppress(*S3_RETRYABLE_ERRORS):  # while the body is read; the client repeats the request itself
            return cast(tuple[bytes, str], sync(fs.loop, get))
    return cast(tuple[bytes, str], sync(fs.loop, get))


def listing_session(profile: str | None = None) -> Any:
    """A session of aiobotocore, for all clients of a profile, whose clients parse listings fast.

    A session refreshes credentials that say when they expire, as those of a role do. Others, from the environment and
    the files of AWS, it reads once: where they have changed since, the session is a new one.

    Args:
        profile: of the credentials; None takes the environment's.
    """
    return _session(profile, _credentials_now())


def _credentials_now() -> tuple[object, ...]:
    """What is another once credentials have changed that do not say when they expire."""
    stamps: list[object] = [os.environ.get(name) for name in _CREDENTIALS]
    for name, default in _CREDENTIAL_FILES.items():
        path = os.path.expanduser(os.environ.get(name, default))
        try:
            found = os.stat(path)
        except OSError:
            stamps.append(path)
        else:
            stamps.append((path, found.st_mtime_ns, found.st_size, found.st_ino))
    return tuple(stamps)


@lru_cache(8)
def _session(profile: str | None, _credentials: tuple[object, ...]) -> Any:
    from aiobotocore.parsers import AioResponseParserFactory, AioRestXMLParser
    from aiobotocore.session import AioSession
    from botocore import handlers

    class Parser(AioRestXMLParser):  # type: ignore[misc]  # the package has no types
        async def parse(self, response: dict[str, Any], shape: Any) -> Any:
            contents: list[dict[str, Any]] = []
            if shape is not None and shape.name == _LISTING and response["status_code"] == 200:
                response, contents = _without_contents(response)
            parsed = await super().parse(response, shape)
            if contents:
                parsed["Contents"] = contents
            return parsed

    class Factory(AioResponseParserFactory):  # type: ignore[misc]
        def create_parser(self, protocol_name: str) -> Any:
            return Parser(**self._defaults) if protocol_name == "rest-xml" else super().create_parser(protocol_name)

    session = AioSession(profile=profile)
    session.register_component("response_parser_factory", Factory())
    for event, of_client, *_ in handlers.BUILTIN_HANDLERS:
        if getattr(of_client, "__name__", "") == _LOOKS_FOR_ERROR:
            session.unregister(event, of_client)
            session.get_component("event_emitter").register_first(event, partial(_look_for_error, of_client))
    _sessions.add(session)
    return session


def _look_for_error(of_client: Callable[..., object], response_dict: dict[str, Any], **given: Any) -> None:
    """Looks for an error in an answer of status 200, as the client does by parsing it: not where it is a whole listing.

    The client parses a listing for that a second time.
    """
    body = response_dict.get("body")
    is_whole = isinstance(body, bytes) and body.rstrip().endswith(b"</%s>" % _ROOT) and b"<%s" % _ROOT in body[:_HEAD]
    if not is_whole:
        of_client(response_dict=response_dict, **given)


def _without_contents(response: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A response without the objects that it lists, and these; as it is where it has what is not known here."""
    try:
        head, *entries = response["body"].decode().split("<Contents>")
        found, left = [], [head]
        for entry in entries:
            content, _, more = entry.partition("</Contents>")
            fields = _FIELD.findall(content)
            parsed = {name: _PARSED[name](unescape(text)) for name, text in fields}
            if len(parsed) < len(fields):  # one is repeated
                return response, []
            found.append(parsed)
            left.append(more)
    except (KeyError, ValueError):
        return response, []
    return {**response, "body": "".join(left).encode()}, found
