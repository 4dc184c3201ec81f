"""The exception tree of mm_assets: everything this package raises on purpose.

The class says whose fault it is: `FormatError` the file's, `EncodeError` the caller's value, `SourceError` the storage
behind a locator, `ConfigError` the declaration's. Leaf classes take typed facts, so that every message names where,
what was found and what was expected. A bug raises whatever Python raises; nothing here wraps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "BadMagicError",
    "CollateError",
    "ConfigError",
    "CorruptError",
    "EncodeError",
    "FilterError",
    "FormatError",
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
    "optional_import",
]


class MmAssetsError(Exception):
    """Base of every error that mm_assets raises on purpose."""


class FormatError(MmAssetsError, ValueError):
    """A packed file is wrong: not ours, too new, truncated or damaged.

    Args:
        path: file path or URL.
        detail: what is wrong, a clause without a final period.
        sample: index of the sample concerned, if one is.
        modality: name of the packed modality concerned, if one is.
        found: what is in the file.
        expected: what should be there.
    """

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

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries; the default rebuilds from the message alone and fails.
        state = (type(self), self.path, self.detail, self.sample, self.modality, self.found, self.expected)
        return _rebuild_format_error, state


def _rebuild_format_error(
    cls: type[FormatError],
    path: str,
    detail: str,
    sample: int | None,
    modality: str | None,
    found: object,
    expected: object,
) -> FormatError:
    return cls(path, detail, sample=sample, modality=modality, found=found, expected=expected)


class BadMagicError(FormatError):
    """The file does not start with a magic that we know."""


class UnsupportedVersionError(FormatError):
    """The file is of a version that this release does not read."""


class TruncatedError(FormatError):
    """The file is shorter than its own structures say."""


class CorruptError(FormatError):
    """The file's bytes contradict themselves, their checksums, or a configured limit."""


class SchemaMismatchError(MmAssetsError):
    """The file, or the table, and the given fields or columns disagree."""


class EncodeError(MmAssetsError, ValueError):
    """A value that was to be written is wrong for its field."""


class SourceError(MmAssetsError):
    """The content of a locator is not available: missing, short, outside the allowed places, or changed underneath.

    Args:
        path: file path or URL of the source.
        detail: what is wrong, a clause without a final period.
        member: the archive member concerned, if one is.
        byte_offset: absolute position in the source in bytes, if one is known.
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

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_source_error, (type(self), self.path, self.detail, self.member, self.byte_offset)


def _rebuild_source_error(
    cls: type[SourceError], path: str, detail: str, member: str | None, byte_offset: int | None
) -> SourceError:
    return cls(path, detail, member=member, byte_offset=byte_offset)


class ShardError(SourceError):
    """A shard cannot be read through: its archive structure is damaged at a byte offset."""


class ShardReadError(SourceError):
    """The storage failed while an archive was read: nothing is known of its content, and a later run may have it."""


class MissingColumnError(SourceError):
    """A column that the declaration asks for is in no sample of a shard or list."""


class ConfigError(MmAssetsError, ValueError):
    """A declaration is wrong: an unknown key, a value of the wrong kind, or two settings that exclude each other.

    Args:
        where: the file, or "arguments", that holds the declaration.
        key: dotted path of the key, such as ``pack.fields[0].field``.
        detail: what was found and what is allowed, a clause without a final period.
    """

    def __init__(self, where: object, key: str, detail: str) -> None:
        self.where = str(where)
        self.key = key
        self.detail = detail
        super().__init__(f"{self.where}: {key}: {detail}")

    def __reduce__(self) -> tuple[object, ...]:
        return ConfigError, (self.where, self.key, self.detail)


_EXTRAS = {
    "av": "video",
    "cv2": "resize",
    "duckdb": "arrow",
    "hypothesis": "testing",
    "pandas": "pandas",
    "pyarrow": "arrow",
    "pytest": "testing",
    "s3fs": "s3",
    "soundfile": "audio",
    "soxr": "video",
    "tokenizers": "text",
    "torch": "torch",
    "zstandard": "depth",
}
"""By the import name of an optional package, the extra that installs it."""


class MissingExtraError(MmAssetsError, ImportError):
    """A feature needs a package that is not installed; the message has the command that installs it.

    Args:
        feature: what was asked for.
        package: import name of the package.
    """

    def __init__(self, feature: str, package: str) -> None:
        self.feature = feature
        self.package = package
        super().__init__(f"{feature} needs {package}, which is not installed: {_install_command(package)}")

    def __reduce__(self) -> tuple[object, ...]:
        return MissingExtraError, (self.feature, self.package)


def _install_command(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, metadata  # slow to import, and needed for this alone

    extra = _EXTRAS.get(package)
    if extra is None:
        return f"pip install {package}"
    for name in ("mm-assets", "mm-assets-reader"):  # two wheels of one package, with extras of their own
        try:
            extras = metadata(name).get_all("Provides-Extra", [])
        except PackageNotFoundError:
            continue
        # What is not an extra is a requirement, which pip installs again.
        return f"pip install '{name}[{extra}]'" if extra in extras else f"pip install {name}"
    return f"pip install 'mm-assets[{extra}]'"  # a source tree on the path


@contextmanager
def optional_import(package: str, feature: str) -> Iterator[None]:
    """Around the import of a package that may not be installed.

    Args:
        package: its import name.
        feature: what needs it.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise  # the package is there, and lacks another
        raise MissingExtraError(feature, package) from error


class FilterError(MmAssetsError):
    """A filter or annotator broke its contract: a row out of range, a column missing or of the wrong length or type.

    Args:
        name: the filter or annotator.
        detail: what it did and what was expected, a clause without a final period.
    """

    def __init__(self, name: str, detail: str) -> None:
        self.name = name
        self.detail = detail
        super().__init__(f"{name}: {detail}")

    def __reduce__(self) -> tuple[object, ...]:
        return FilterError, (self.name, self.detail)


class MediaError(MmAssetsError, ValueError):
    """Media bytes cannot be read: an unknown codec, a damaged or truncated header, or an impossible size.

    Args:
        name: of the bytes: a file name, or a description such as ``<image>``.
        reason: what was found and what was expected, a clause without a final period.
    """

    def __init__(self, name: object, reason: str) -> None:
        self.name = str(name)
        self.reason = reason
        super().__init__(f"{self.name}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return MediaError, (self.name, self.reason)


class CollateError(MmAssetsError, ValueError):
    """Values do not fit their rule for making a batch.

    Args:
        output: the output of the batch.
        detail: what was found and what was expected, a clause without a final period.
        row: row of the batch, if one is the cause.
    """

    def __init__(self, output: str, detail: str, *, row: int | None = None) -> None:
        self.output = output
        self.detail = detail
        self.row = row
        super().__init__(f"output {output!r}" + ("" if row is None else f", row {row}") + f": {detail}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_collate_error, (self.output, self.detail, self.row)


def _rebuild_collate_error(output: str, detail: str, row: int | None) -> CollateError:
    return CollateError(output, detail, row=row)


class LoaderError(MmAssetsError):
    """A loader cannot continue: a state is of another dataset or order, or no readable sample is left.

    Args:
        detail: what was found and what was expected, a clause without a final period.
    """
