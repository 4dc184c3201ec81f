"""URLs and the file systems that they name; the errors of a storage client as this project's own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import fsspec
from fsspec import get_filesystem_class

from mm_assets.errors import (
    CredentialsError,
    MissingExtraError,
    MmAssetsError,
    SourceError,
    is_secret_parameter,
    masked_urls,
)
from mm_assets.storage.s3_listing import use_fast_listings

__all__ = [
    "CHAINED",
    "NO_SIZE",
    "Options",
    "before_pattern",
    "credentials_fault",
    "filesystem",
    "http_status",
    "is_local",
    "is_web",
    "local_path",
    "normalized_url",
    "protocols",
    "public_url",
    "reason",
    "redirects_only_to",
    "signed_url",
    "split_signature",
    "storage_errors",
    "storage_fault",
    "url_fault",
    "without_query",
]

# Connections of an S3 client: the ranges of a random batch are requested together, and its own default is 10.
S3_CONNECTIONS = 64

CHAINED = (
    "is a list with :: between shards or a chained URL of fsspec, and neither is read: write several shards with "
    "braces, as in folder/{a,b}.tar or folder/{00000..00099}.tar; name the file without simplecache:: or filecache:: "
    "before it (a shard is read by ranges, each once), and unpack an archive that zip:// or tar:// would open"
)
"""What is wrong with ``a.tar::b.tar`` and with a URL such as ``simplecache::s3://bucket/x.tar``, and what to do."""

NO_SIZE = (
    "the storage does not report the file's size, which an HTTP server has to give as Content-Length: a shard is read "
    "by ranges; copy it to a folder or to object storage"
)

_ARCHIVES = ("zip://", "tar://", "libarchive://")
_NEXT_URL = re.compile(r"::(?:[A-Za-z][\w+.-]*://|/|~)")
_LOCAL_SCHEME = re.compile(r"(?:file|local):(?://(?:localhost(?=/))?)?")
_WEB = ("http://", "https://")
# Query parameters that sign a URL, of S3, Google Cloud Storage, OSS, COS and CloudFront; those of Azure are short.
_SIGNING = re.compile(
    r"(x-amz|x-goog|x-oss|q)-.*|expires|policy|key-pair-id|awsaccesskeyid|googleaccessid|ossaccesskeyid", re.I
)
_OF_SAS = re.compile("s[vsrpet]|srt|spr|sip|sk(oid|tid|[tesv])|s[au]oid|scid|sdd|ses|sig")
_ALSO_NAMES = {"key"}  # a secret by its name that may as well name the file

_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give them in `storage_options` (of the "
    "shards) or `root_options` (of the root); a public bucket needs {anon: true} there"
)
# What to say about S3's error codes (AmazonS3/latest/API/ErrorResponses.html), those of AWS's token service, and errors
# of botocore and google-auth, which are optional packages, by name.
_CREDENTIALS_FAULTS = {
    "the credentials have expired ({}): get new ones, such as another AWS_SESSION_TOKEN or by `aws sso login`, then "
    "run this again, which does the rest": (
        *("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"),
        *("TokenRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError", "RefreshError"),
    ),
    "the clock of this machine differs by more than the storage accepts ({}): set it, then run this again": (
        *("RequestTimeTooSkewed", "RequestInTheFuture"),
    ),
    f"there are no credentials ({{}}): {_CREDENTIALS}": ("NoCredentialsError", "PartialCredentialsError"),
    f"the storage does not accept the credentials ({{}}): {_CREDENTIALS}": (
        *("InvalidToken", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidSecurity", "SignatureDoesNotMatch"),
        *("NotSignedUp", "UnrecognizedClientException", "CredentialRetrievalError", "DefaultCredentialsError"),
    ),
}
_REFUSALS = ("Access Denied", "Forbidden")  # S3's words for HTTP 403, without a reason
_REFUSED = (400, 401, 403)  # HTTP statuses of S3 for expired credentials, among others
_PERMISSIONS = (
    "the credentials in use may not do this: reading takes s3:GetObject and s3:ListBucket, writing s3:PutObject and "
    "s3:DeleteObject; a public bucket needs {anon: true} in `storage_options`"
)
_SIGN_AGAIN = "if the URL is presigned, it may have expired: sign it again, which makes it no other shard"

Options = Mapping[str, Any]


def is_local(url: str) -> bool:
    """Whether `url` is a path of the local file system (plain, or ``file://``)."""
    return "://" not in url or url.startswith(("/", "file://", "local://"))


def is_web(url: str) -> bool:
    """Whether `url` is read by HTTP, so that ``?`` begins its query."""
    return url.startswith(_WEB)


def without_query(url: str) -> str:
    """Returns a URL that HTTP reads without its query and fragment; any other path or URL as it is."""
    return re.split("[?#]", url, maxsplit=1)[0] if is_web(url) else url


def before_pattern(url: str) -> str:
    """Returns the part of a path, URL or pattern before the first ``*``, ``?``, ``[`` or ``{`` in it."""
    return re.split(r"[*?\[{]", url, maxsplit=1)[0]


def is_chain(url: str) -> bool:
    """Whether a text is several paths or URLs with ``::`` between them, and not a name that has it."""
    if "::" not in url:
        return False
    if not is_local(url):
        return "::" in url.partition("://")[0] or url.startswith(_ARCHIVES) or _NEXT_URL.search(url) is not None
    if url.startswith(("/", "./", "../", "~")) and _NEXT_URL.search(url) is None:
        return False
    end = url.find("/", url.rindex("::"))
    return not os.path.lexists(local_path(url if end < 0 else url[:end]))


def url_fault(url: str) -> str | None:
    """Returns what is wrong with a text given for a path or URL, by its form alone, and what to do; None if nothing."""
    if url.startswith("pipe:"):
        return "is a command, which is not run: name the file or URL that it reads"
    if url == "-":
        return "is standard input, which is not read: name the file, folder, pattern or URL"
    return CHAINED if is_chain(url) else None


def local_path(url: str) -> Path:
    """The absolute path of a local URL, with ``~`` expanded."""
    return Path(_absolute(_LOCAL_SCHEME.sub("", url, count=1)))


def normalized_url(url: str, base: Path | None = None) -> str:
    """Returns the one spelling of a place that may be written in several, without reading any storage.

    A local path, which may be a pattern, becomes absolute, without ``~``, ``.``, ``..`` and a slash at its end; if
    braces hold slashes, the part before them. Another URL only loses slashes at its end, unless HTTP reads it.

    Args:
        url: a path or URL.
        base: folder at which relative paths start; None takes the current one.
    """
    if not is_local(url):
        return url if is_web(url) else url.rstrip("/")
    path = os.path.join(base or Path.cwd(), os.path.expanduser(_LOCAL_SCHEME.sub("", url, count=1)))
    if "/" not in path[path.find("{") : path.rfind("}")]:
        return _absolute(path)
    folder = path[: path.index("{")].rpartition("/")[0]
    return f"{_absolute(folder or '/').rstrip('/')}{path[len(folder) :]}".rstrip("/")


def _absolute(path: str) -> str:
    return re.sub("^//", "/", os.path.abspath(os.path.expanduser(path)))  # POSIX leaves two slashes at the start


def split_signature(url: str) -> tuple[str, str]:
    """Splits a presigned URL into the URL that stays the same when it is signed again, and the query that signs it.

    Only URLs that HTTP reads have signatures; of any other the second is empty.
    """
    place, mark, query = url.partition("?")
    if not mark or not is_web(url):
        return url, ""
    given = [(parameter.partition("=")[0], parameter) for parameter in query.split("&")]
    secret = {name for name, _ in given if is_secret_parameter(name) and name.lower() not in _ALSO_NAMES}
    if not secret:
        return url, ""
    is_sas = "sig" in secret
    signing = {name for name, _ in given if _SIGNING.fullmatch(name) or (is_sas and _OF_SAS.fullmatch(name))} | secret
    kept = "&".join(parameter for name, parameter in given if name not in signing)
    return place + (f"?{kept}" if kept else ""), "&".join(text for name, text in given if name in signing)


def signed_url(url: str, signature: str) -> str:
    """Returns a URL with the query that signs it, as `split_signature` gave them."""
    return f"{url}{'&' if '?' in url else '?'}{signature}" if signature else url


def filesystem(url: str, options: Options | None) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URL, and the path in it, which has no signature.

    Args:
        url: a path or URL; that of an HTTP server may be presigned.
        options: arguments of the file system. Of HTTP also ``signature``, the query that signs every URL.

    Raises:
        MissingExtraError: the package that reads such URLs is not installed.
        SourceError: no file system has the URL's scheme, or it is a chain of several.
    """
    if is_chain(url):
        raise SourceError(url, CHAINED)
    settings = dict(options or {})
    scheme = "file" if is_local(url) else url.partition("://")[0]
    if scheme != "file":
        # A daemon runs for days: a cached listing would hide new shards and changed ones.
        settings.setdefault("use_listings_cache", False)
    if scheme in ("s3", "s3a"):
        settings["config_kwargs"] = {"max_pool_connections": S3_CONNECTIONS, **(settings.get("config_kwargs") or {})}
    url, signature = split_signature(url)
    if signature:
        settings["signature"] = signature
    try:
        of_scheme = _signing_file_system() if "signature" in settings and is_web(url) else get_filesystem_class(scheme)
        # Not fsspec's `url_to_fs`, which takes `::` in a name for a chain.
        fs, path = of_scheme(**{**of_scheme._get_kwargs_from_urls(url), **settings}), of_scheme._strip_protocol(url)
    except ImportError as error:  # fsspec's own, over the one that names the package
        missing = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        if not isinstance(missing, ModuleNotFoundError) or missing.name is None:
            raise
        raise MissingExtraError(f"{scheme}://", missing.name.partition(".")[0]) from error
    except ValueError as error:
        if scheme in fsspec.available_protocols():
            raise
        raise SourceError(url, f"{scheme}:// is not known, expected a path or a URL that fsspec reads") from error
    if "s3" in protocols(fs):
        use_fast_listings(fs)
        _explain_refused_heads(fs)
    return fs, path


@cache
def _signing_file_system() -> type[fsspec.AbstractFileSystem]:
    """The file system of HTTP that signs each URL when it is requested, so that paths and errors have no signature."""
    from fsspec.implementations.http import HTTPFileSystem

    class SigningFileSystem(HTTPFileSystem):  # type: ignore[misc]  # the package has no types
        def __init__(self, *, signature: str, **settings: Any) -> None:
            super().__init__(**settings)
            self._signature = signature

        def encode_url(self, url: str) -> Any:
            return super().encode_url(signed_url(url, self._signature))

    return SigningFileSystem


def _explain_refused_heads(fs: Any) -> None:
    """Lets a file system of s3fs ask for the reason of a refused HEAD, whose reply has none, by a request that has."""
    if "_call_s3" in vars(fs):
        return
    call = fs._call_s3

    async def explained(method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return await call(method, *args, **kwargs)
        except OSError as error:
            if not method.startswith("head_") or http_status(error) not in _REFUSED:
                raise
            try:
                await call("list_objects_v2", Bucket=kwargs["Bucket"], Prefix=kwargs.get("Key", ""), MaxKeys=1)
            except OSError as reply:
                if credentials_fault(reply) is not None:
                    raise reply from reply.__cause__
            raise

    vars(fs)["_call_s3"] = explained


def redirects_only_to(is_allowed: Callable[[str], bool], url: str, options: Options | None) -> Options | None:
    """Options for the file system of a URL that a table names: over HTTP it follows redirects to allowed URLs alone.

    Reading through any other redirect raises `SourceError`, before a request goes to its target.
    """
    if not is_web(url):
        return options
    from aiohttp import TraceConfig
    from yarl import URL

    class Redirects(TraceConfig):
        def __repr__(self) -> str:  # by which fsspec takes the options of two file systems as equal
            return f"redirects only to {is_allowed!r}"

    async def check(_session: object, _context: object, redirect: Any) -> None:
        headers = redirect.response.headers
        target = redirect.url.join(URL(headers.get("Location") or headers.get("URI") or ""))
        if not is_allowed(str(target)):
            detail = (
                f"redirects to {target.with_query(None)}, which `samples.allowed_references` does not cover: add it "
                "there if it may be read"
            )
            raise SourceError(url, detail)

    traced = Redirects()
    traced.on_request_redirect.append(check)
    client = dict((options or {}).get("client_kwargs") or {})
    return {**(options or {}), "client_kwargs": {**client, "trace_configs": [*client.get("trace_configs", ()), traced]}}


def public_url(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """The URL of a path in a file system; of the local one the path."""
    return path if "file" in protocols(fs) else str(fs.unstrip_protocol(path))


def protocols(fs: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    """The names under which a file system is known."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def reason(error: Exception) -> str:
    """The message of an error, in the system's words where it has some, without secrets of URLs."""
    if (fault := credentials_fault(error)) is not None:
        return masked_urls(fault)
    if isinstance(error, FileNotFoundError) and error.strerror is None:  # fsspec's, whose text is the path alone
        if error.__cause__ is not None and http_status(error) in _REFUSED:
            return f"the server refuses access (HTTP {http_status(error)}); {_SIGN_AGAIN}"
        cause = error.__cause__
        if isinstance(cause, SourceError):  # of `redirects_only_to`
            return cause.detail
        if isinstance(cause, TypeError) and "unexpected keyword" in str(cause):  # it is passed to each request
            return f"`storage_options` have an argument that this kind of URL does not take ({cause})"
        return "not found" if cause is None else masked_urls(f"not found ({type(cause).__name__}: {cause})")
    if isinstance(error, OSError):
        said = error.strerror or str(error) or type(error).__name__
        is_denied = said.rstrip(".") in _REFUSALS or "AccessDenied" in _names(error)
        return masked_urls(f"{said} ({_PERMISSIONS})" if is_denied else said)
    return masked_urls(f"{type(error).__name__}: {error}")


def credentials_fault(error: BaseException) -> str | None:
    """Returns what is wrong with the credentials that a storage refused, and what to do; None for any other error."""
    names = _names(error)
    for fault, known in _CREDENTIALS_FAULTS.items():
        if name := next((name for name in known if name in names), None):
            message = next((reply.get("Message") for reply in _replies(error)), None)
            message = message or next((str(cause) for cause in _causes(error) if type(cause).__name__ == name), None)
            return fault.replace("{}", f"{name}: {message}" if message else name)
    return None


def _names(error: BaseException) -> set[str]:
    """The codes of a storage's replies in an error and what caused it, and the names of their classes."""
    names = {cls.__name__ for cause in _causes(error) for cls in type(cause).__mro__}
    return names | {str(reply.get("Code")) for reply in _replies(error)}


def _replies(error: BaseException) -> Iterator[Mapping[str, Any]]:
    """What a storage says is wrong, of botocore's errors."""
    for cause in _causes(error):
        reply = getattr(cause, "response", None)
        if isinstance(reply, Mapping):
            yield reply.get("Error", {})


_SLOW_DOWN = (429, 503)  # of HTTP: too many requests, and S3's "SlowDown"
_UNAVAILABLE = (408, 500, 502, 504)
# Of botocore and aiohttp, which are optional packages, by name.
_CONNECTION_ERRORS = {"HTTPClientError", "ClientConnectionError", "ClientPayloadError", "IncompleteReadError"}

StorageFault = Literal["slow_down", "unavailable", "credentials"]


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
    """What a storage failed with that is not about one file, by an error or what caused it; None for any other error.

    What is slow or unavailable may pass; credentials are refused until they are replaced.
    """
    if credentials_fault(error) is not None:
        return "credentials"
    status = http_status(error)
    if status is not None:
        return "slow_down" if status in _SLOW_DOWN else "unavailable" if status in _UNAVAILABLE else None
    is_lost = any(isinstance(cause, (ConnectionError, TimeoutError)) for cause in _causes(error))
    return "unavailable" if is_lost or _names(error) & _CONNECTION_ERRORS else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those that led to it, the latest first."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


@contextmanager
def storage_errors(url: str, what: str, *, byte_offset: int | None = None) -> Iterator[None]:
    """Turns the errors of a storage into `SourceError`, or `CredentialsError`.

    Of any type: a client may raise its HTTP library's errors, which have no base class in common with the system's.
    """
    try:
        yield
    except (MmAssetsError, MemoryError):
        raise
    except Exception as error:  # any error of the client's HTTP library; it stays the cause
        kind = SourceError if credentials_fault(error) is None else CredentialsError
        raise kind(url, f"{what}: {reason(error)}", byte_offset=byte_offset) from error
