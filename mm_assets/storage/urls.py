"""URLs and the file systems that they name; the errors of a storage client as this project's own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import fsspec
from fsspec.core import url_to_fs

from mm_assets.errors import MissingExtraError, MmAssetsError, SourceError
from mm_assets.storage.s3_listing import use_fast_listings

__all__ = [
    "CHAINED",
    "Options",
    "filesystem",
    "http_status",
    "is_local",
    "local_path",
    "protocols",
    "public_url",
    "reason",
    "storage_errors",
    "storage_fault",
]

# Connections of an S3 client: the ranges of a random batch are requested together, and its own default is 10.
S3_CONNECTIONS = 64

CHAINED = (
    "is a chained URL of fsspec, which is not read: name the file without simplecache:: or filecache:: before it (a "
    "shard is read by ranges, each once), and unpack an archive that zip:// or tar:// would open"
)
"""What is wrong with a URL such as ``simplecache::s3://bucket/x.tar``, and what to do."""

_LACKING = ("NoCredentialsError", "PartialCredentialsError")  # of botocore, an optional package
_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give them in `storage_options` (of the "
    "shards) or `root_options` (of the root); a public bucket needs {anon: true} there"
)
_REFUSALS = ("Access Denied", "Forbidden")  # S3's words for HTTP 403, without a reason
_PERMISSIONS = (
    "the credentials in use may not do this: reading takes s3:GetObject and s3:ListBucket, writing s3:PutObject and "
    "s3:DeleteObject; a public bucket needs {anon: true} in `storage_options`"
)

Options = Mapping[str, Any]


def is_local(url: str) -> bool:
    """Whether `url` is a path of the local file system (plain, or ``file://``)."""
    return "://" not in url or url.startswith(("file://", "local://"))


def local_path(url: str) -> Path:
    """The absolute path of a local URL, with ``~`` expanded."""
    return Path(os.path.abspath(os.path.expanduser(url.split("://", 1)[-1] if "://" in url else url)))


def filesystem(url: str, options: Options | None) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URL, and the path in it.

    Raises:
        MissingExtraError: the package that reads such URLs is not installed.
        SourceError: no file system has the URL's scheme, or it is a chain of several.
    """
    if "::" in url:
        raise SourceError(url, CHAINED)
    settings = dict(options or {})
    if not is_local(url):
        # A daemon runs for days: a cached listing would hide new shards and changed ones.
        settings.setdefault("use_listings_cache", False)
    if url.startswith(("s3://", "s3a://")):
        settings["config_kwargs"] = {"max_pool_connections": S3_CONNECTIONS, **(settings.get("config_kwargs") or {})}
    try:
        fs, path = url_to_fs(url, **settings)
    except ImportError as error:  # fsspec's own, over the one that names the package
        missing = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        if not isinstance(missing, ModuleNotFoundError) or missing.name is None:
            raise
        raise MissingExtraError(f"{url.partition('://')[0]}://", missing.name.partition(".")[0]) from error
    except ValueError as error:
        scheme = url.partition("://")[0]
        if is_local(url) or scheme in fsspec.available_protocols():
            raise
        raise SourceError(url, f"{scheme}:// is not known, expected a path or a URL that fsspec reads") from error
    if "s3" in protocols(fs):
        use_fast_listings(fs)
    return fs, path


def public_url(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """The URL of a path in a file system; of the local one the path."""
    return path if "file" in protocols(fs) else str(fs.unstrip_protocol(path))


def protocols(fs: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    """The names under which a file system is known."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def reason(error: Exception) -> str:
    """The message of an error, in the system's words where it has some."""
    if isinstance(error, FileNotFoundError) and error.strerror is None:  # fsspec's, whose text is the path alone
        cause = error.__cause__
        return "not found" if cause is None else f"not found ({type(cause).__name__}: {cause})"
    if isinstance(error, OSError):
        said = error.strerror or str(error) or type(error).__name__
        return f"{said} ({_PERMISSIONS})" if said.rstrip(".") in _REFUSALS else said
    said = f"{type(error).__name__}: {error}"
    return f"{said}; {_CREDENTIALS}" if type(error).__name__ in _LACKING else said


_SLOW_DOWN = (429, 503)  # of HTTP: too many requests, and S3's "SlowDown"
_UNAVAILABLE = (408, 500, 502, 504)
# Of botocore and aiohttp, which are optional packages, by name.
_CONNECTION_ERRORS = {"HTTPClientError", "ClientConnectionError", "ClientPayloadError", "IncompleteReadError"}

StorageFault = Literal["slow_down", "unavailable"]


def http_status(error: BaseException) -> int | None:
    """The status of the reply that a client's error, or what caused it, is about."""
    for cause in _causes(error):
        reply = getattr(cause, "response", None)  # of botocore's errors
        status = reply.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(reply, Mapping) else None
        # Of aiohttp's errors, of those of Google Cloud Storage, and of Azure's.
        names = iter(("status", "code", "status_code"))
        while status is None and (name := next(names, None)) is not None:
            found = getattr(cause, name, None)
            status = found if isinstance(found, int) and 400 <= found < 600 else None
        if isinstance(status, int):
            return status
    return None


def storage_fault(error: BaseException) -> StorageFault | None:
    """What a storage failed with that may pass, by an error or what caused it; None for any other error."""
    status = http_status(error)
    if status is not None:
        return "slow_down" if status in _SLOW_DOWN else "unavailable" if status in _UNAVAILABLE else None
    for cause in _causes(error):
        names = {cls.__name__ for cls in type(cause).__mro__}
        if isinstance(cause, (ConnectionError, TimeoutError)) or names & _CONNECTION_ERRORS:
            return "unavailable"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those that led to it, the latest first."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


@contextmanager
def storage_errors(url: str, what: str, *, byte_offset: int | None = None) -> Iterator[None]:
    """Turns the errors of a storage into `SourceError`.

    Of any type: a client may raise its HTTP library's errors, which have no base class in common with the system's.
    """
    try:
        yield
    except (MmAssetsError, MemoryError):
        raise
    except Exception as error:  # any error of the client's HTTP library; it stays the cause
        raise SourceError(url, f"{what}: {reason(error)}", byte_offset=byte_offset) from error
