"""The exception tree of mm_assets: everything this package raises on purpose.

The class says what is wrong: `FormatError` a packed file, `EncodeError` the caller's value, `SourceError` the storage
behind a locator, `ConfigError` a declaration. Classes take typed facts, so that every message says where the error is,
what was found and what was expected. A `detail` or `reason` is a clause without a final period. A bug raises whatever
Python raises; nothing here wraps it.
"""

from __future__ import annotations

import copy
import errno
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, ParamSpec, Self

__all__ = [
    "BadMagicError",
    "ChangedError",
    "CollateError",
    "ConfigError",
    "CorruptError",
    "CredentialsError",
    "EncodeError",
    "FilterError",
    "FormatError",
    "LimitError",
    "LoaderError",
    "MediaError",
    "MissingColumnError",
    "MissingExtraError",
    "MmAssetsError",
    "SchemaMismatchError",
    "ShardError",
    "ShardReadError",
    "SourceError",
    "TruncatedError",
    "UnsupportedVersionError",
    "best_effort",
    "best_effort_notes",
    "first_line",
    "full_disk_named",
    "is_secret_parameter",
    "masked_urls",
    "meant",
    "optional_import",
    "temporary_disk_named",
]

_P = ParamSpec("_P")


class MmAssetsError(Exception):
    """Base of every error that mm_assets raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries. The default calls the class with the message alone, which fails.
        return _without_init, (type(self), *self.args), self.__dict__


def _without_init(cls: type[MmAssetsError], *args: object) -> MmAssetsError:
    return cls.__new__(cls, *args)


class _LocatedError(MmAssetsError, ValueError):
    """An error with a place in a packed file; `FormatError` has the arguments."""

    def __init__(
        self,
        path: object,
        detail: str,
        *,
        sample: int | None = None,
        modality: str | None = None,
        found: object = None,
        expected: object = None,
    ) -> None:
        self.path = str(path)
        self.detail = detail
        self.sample = sample
        self.modality = modality
        self.found = found
        self.expected = expected
        where = self.path
        if sample is not None:
            where += f", sample {sample}"
        if modality is not None:
            where += f", modality {modality!r}"
        message = f"{where}: {detail}"
        if found is not None or expected is not None:
            message += f" (found {found}, expected {expected})"
        super().__init__(message)

    def moved(self, path: object, *, sample: int | None = None, modality: str | None = None, detail: str = "") -> Self:
        """The same error in another place, and with another detail if one is given."""
        result = copy.copy(self)
        found, expected = self.found, self.expected
        _LocatedError.__init__(
            result, path, detail or self.detail, sample=sample, modality=modality, found=found, expected=expected
        )
        return result


class FormatError(_LocatedError):
    """A packed file is wrong: another format, too new, truncated or damaged.

    Args:
        path: file path or URL.
        detail: what is wrong.
        sample: index of the sample where the error is, if it is in one.
        modality: name of the packed modality where it is, if it is in one.
        found: what is in the file.
        expected: what should be there.
    """


class BadMagicError(FormatError):
    """The file does not start with a known magic number."""


class UnsupportedVersionError(FormatError):
    """The file has a version that this release does not read."""


class TruncatedError(FormatError):
    """The file is shorter than its own structures require."""


class CorruptError(FormatError):
    """The file's bytes contradict themselves or their checksums."""


class SchemaMismatchError(MmAssetsError):
    """A file or table does not have the given fields or columns."""


class EncodeError(MmAssetsError, ValueError):
    """A value does not fit the field that should encode it."""


class LimitError(_LocatedError, EncodeError):
    """A value exceeds a limit that a setting of its field has, while it is encoded or decoded.

    Nothing says that the value is damaged: another value of the setting allows it. So it is no `FormatError`, is not
    skipped or counted as damage, and does not stop the samples around it from being packed.

    Args:
        path: file path or URL; the name of the field while a value is encoded.
        detail: what is too large.
        setting: name of the setting.
        found: size of the value.
        expected: what the setting allows.
    """

    def __init__(
        self, path: object, detail: str, *, setting: str, found: object = None, expected: object = None
    ) -> None:
        self.setting = setting
        super().__init__(path, detail, found=found, expected=None if expected is None else f"{expected} ({setting})")


class SourceError(MmAssetsError):
    """The content of a locator is not available: missing, too short, outside the allowed paths, or changed.

    Args:
        path: file path or URL of the source.
        detail: what is wrong.
        member: the archive member, if the error is in one.
        byte_offset: absolute position in the source, if it is known.
    """

    def __init__(self, path: object, detail: str, *, member: str | None = None, byte_offset: int | None = None) -> None:
        self.path = str(path)
        self.detail = detail
        self.member = member
        self.byte_offset = byte_offset
        where = self.path
        if member is not None:
            where += f", member {member!r}"
        if byte_offset is not None:
            where += f", at byte {byte_offset}"
        super().__init__(f"{where}: {detail}")


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextmanager
def full_disk_named(path: object) -> Iterator[None]:
    """Turn the system's refusal to store more into a `SourceError` that names `path`; other errors are not about it.

    Of two such blocks, one in the other, the outer one names the file: to the inner one it may have a temporary name.
    """
    try:
        yield
    except (OSError, SourceError) as error:
        cause = error.__cause__ if isinstance(error, SourceError) else error
        if not isinstance(cause, OSError) or cause.errno not in _NO_SPACE:
            raise
        what = f"cannot be written: {os.strerror(cause.errno)}"
        raise SourceError(path, f"{what}: {_way_out(path, cause.errno)}, then run this again") from cause


@contextmanager
def temporary_disk_named() -> Iterator[None]:
    """Turn the system's refusal to store temporary files into a `SourceError` that names their folder."""
    import tempfile

    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:  # it tried to write to $TMPDIR and to the system's places
        detail = f"cannot be written: {error.strerror}: set it to a folder with free space, then run this again"
        raise SourceError("TMPDIR", detail) from error
    with full_disk_named(folder):
        yield


def _way_out(path: object, refused: int) -> str:
    """What to do about a file system that stores no more of a file."""
    if refused == errno.EFBIG:
        return "give it a file system, or a limit (ulimit -f), for larger files"
    disk = "its disk"
    if "://" not in str(path):
        target = Path(str(path)).absolute()
        mounted = (str(place) for place in (target, *target.parents) if place.is_mount())
        disk = f"the disk at {next(mounted, 'its root')}"
    if refused == errno.EROFS:
        return f"make {disk} writable"
    return f"free some space on {disk}" + (", or raise the quota" if refused == errno.EDQUOT else "")


class ChangedError(SourceError):
    """A file was replaced by another process since it was read."""


class CredentialsError(SourceError):
    """The storage does not accept the credentials, which have expired for instance: every request will fail alike."""


class ShardError(SourceError):
    """A shard cannot be read to its end: its archive structure is damaged at a byte offset."""


class ShardReadError(SourceError):
    """The storage failed while an archive was read: the content may be fine, and a later run may succeed."""


class MissingColumnError(SourceError):
    """No sample of a shard or list has a column that the declaration asks for."""


class ConfigError(MmAssetsError, ValueError):
    """A declaration is wrong: an unknown key, a value of the wrong kind, or two settings that exclude each other.

    Args:
        where: the file of the declaration, or "arguments".
        key: dotted path of the key, such as ``pack.fields[0].field``.
        detail: what was found and what is allowed.
    """

    def __init__(self, where: object, key: str, detail: str) -> None:
        self.where = str(where)
        self.key = key
        self.detail = detail
        super().__init__(f"{self.where}: {key}: {detail}")

    @classmethod
    def of_message(cls, message: str, *, key: str) -> ConfigError:
        """Returns an error about the arguments with a message of its own."""
        error = cls("arguments", key, message)
        error.args = (message,)
        return error


_EXTRAS = {  # import name of an optional package: the extra that installs it
    "av": "video",
    "cv2": "resize",
    "duckdb": "arrow",
    "h5py": "hdf5",
    "huggingface_hub": "hub",
    "hypothesis": "testing",
    "lz4": "mcap",
    "mcap": "mcap",
    "lance": "lance",
    "pandas": "pandas",
    "pillow_heif": "images-extra",
    "pillow_jxl": "images-extra",
    "prometheus_client": "metrics",
    "pyarrow": "arrow",
    "pypdfium2": "pdf",
    "pytest": "testing",
    "ray": "ray",
    "s3fs": "s3",
    "soundfile": "audio",
    "soxr": "video",
    "tokenizers": "text",
    "torch": "torch",
    "yaml": "recipes",
    "zstandard": "depth",
}


class MissingExtraError(MmAssetsError, ImportError):
    """A feature needs a package that is not installed; the message gives the command that installs it.

    Args:
        feature: what needs the package.
        package: its import name.
    """

    def __init__(self, feature: str, package: str) -> None:
        self.feature = feature
        self.package = package
        super().__init__(f"{feature} needs {package}, which is not installed: {install_command(package)}")


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the name of its type where it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


_PASSWORD = re.compile(r"""(\w[\w+.-]*://[^\s/@:"'`<>|]*:)[^\s/"'`<>|]+(?=@)""")
_PARAMETER = re.compile(r"""([?&][\w.%-]*)=([^\s&"'`<>|\\]+)""")
_SECRET = re.compile(
    r"signature|secret|token|credential|passw|api-?_?key|access_?key|(?:^|[?&.-])(?:sig|auth|key)$", re.I
)
MASK = "***"


def masked_urls(text: str) -> str:
    """A text whose URLs have ``***`` in place of passwords and of query parameters that grant access.

    These are `user:password@`, signatures (`X-Amz-Signature`, `X-Goog-Signature`, `sig` of a SAS), tokens and keys.
    """
    if "://" not in text:
        return text
    text = _PASSWORD.sub(rf"\1{MASK}", text)
    return _PARAMETER.sub(_masked_parameter, text)


def is_secret_parameter(name: str) -> bool:
    """Whether a query parameter of this name grants access; it may have the ``?`` or ``&`` before it."""
    return _SECRET.search(name) is not None


def _masked_parameter(found: re.Match[str]) -> str:
    name, value = found.groups()
    end = value[len(value.rstrip(".,:;)]}")) :]  # of the sentence
    return f"{name}={MASK}{end}" if is_secret_parameter(name) else found[0]


_COMPARED = 10_000  # names, of partitions for instance: a second


def meant(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: which of those that are known may be meant; empty where none is."""
    from difflib import get_close_matches  # only for errors

    found = get_close_matches(str(name), list(islice(known, _COMPARED)), n=2, cutoff=0.7)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def install_command(package: str) -> str:
    """Returns the command that installs an optional package, as an extra of the installed wheel if it has that."""
    from importlib.metadata import PackageNotFoundError, metadata  # slow to import

    extra = _EXTRAS.get(package)
    if extra is None:
        return f"pip install {package}"
    for name in ("mm-assets", "mm-assets-reader"):  # two wheels of one package, each with its own extras
        try:
            extras = metadata(name).get_all("Provides-Extra", [])
        except PackageNotFoundError:
            continue
        # A package that the wheel has no extra for is a requirement of the wheel.
        return f"pip install '{name}[{extra}]'" if extra in extras else f"pip install {name}"
    return f"pip install 'mm-assets[{extra}]'"  # a source tree on the path


@contextmanager
def optional_import(package: str, feature: str) -> Iterator[None]:
    """Turn a failed import of `package`, which `feature` needs, into a `MissingExtraError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # the package is installed, but one that it imports is not
        raise MissingExtraError(feature, package) from error


class LazyModule:
    """A module that is imported when an attribute of it is first used.

    For a library that takes a large part of the start-up of commands that do not use it; with an import of its own for
    type checkers.

    Args:
        name: of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value


class FilterError(MmAssetsError):
    """A filter or annotator broke its contract: a row out of range, or a column missing or of the wrong length or type.

    Also for an error that its code raised: it is the cause, and the detail names the sample and the file.

    Args:
        name: the filter or annotator.
        detail: what it did and what was expected.
    """

    def __init__(self, name: str, detail: str) -> None:
        self.name = name
        self.detail = detail
        super().__init__(f"{name}: {detail}")


class MediaError(MmAssetsError, ValueError):
    """Media bytes cannot be read: an unknown codec, a damaged or truncated header, or an impossible size.

    Args:
        name: file name of the bytes, or a description such as ``<image>``.
        reason: what was found and what was expected.
        setting: the limit that the bytes exceed, which says nothing against them; None if they cannot be read.
    """

    def __init__(self, name: object, reason: str, *, setting: str | None = None) -> None:
        self.name = str(name)
        self.reason = reason
        self.setting = setting
        super().__init__(f"{self.name}: {reason}")


class CollateError(MmAssetsError, ValueError):
    """Values do not fit the rule that collates them.

    Args:
        output: the batch's output.
        detail: what was found and what was expected.
        row: row of the batch, if the error is in one.
    """

    def __init__(self, output: str, detail: str, *, row: int | None = None) -> None:
        self.output = output
        self.detail = detail
        self.row = row
        where = f"output {output!r}" if row is None else f"output {output!r}, row {row}"
        super().__init__(f"{where}: {detail}")


class LoaderError(MmAssetsError):
    """A loader cannot continue: a state is from another dataset or order, or no readable sample is left."""


@contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Logs an exception as one warning and continues: a chart, a preview or a link never fails the work it describes.

    Args:
        what: names what is missing because of it, as the start of a sentence.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - drawing code may raise anything, and the data are right without it
        reason = masked_urls(f"{type(error).__name__}: {first_line(error)}")
        logging.getLogger("mm_assets").warning("%s is left out, the data are not affected: %s", what, reason)


def best_effort_notes(notes: Callable[_P, Iterable[str]]) -> Callable[_P, Iterator[str]]:
    """Decorates a function that returns notes for users: an exception ends the notes, as `best_effort` does."""

    @wraps(notes)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[str]:
        with best_effort(f"a note ({notes.__name__.strip('_')})"):
            yield from notes(*args, **kwargs)

    return wrapper
