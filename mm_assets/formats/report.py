"""What writing and verifying a packed file report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSummary:
    """A finished file, or the finished shards of a folder.

    Attributes:
        path: where it is; a URL is a str.
        num_samples: samples in it.
        num_bytes: its size.
        num_present: present rows by modality name.
    """

    path: Path | str
    num_samples: int
    num_bytes: int
    num_present: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDamage:
    """One thing that is wrong in a file.

    Attributes:
        sample: index of the sample, if one is concerned.
        sample_id: its id, where that can still be read.
        modality: name of the modality, if one is concerned.
        message: what is wrong, what was found and what was expected.
    """

    sample: int | None = None
    sample_id: str | None = None
    modality: str | None = None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        path: the file.
        num_samples: samples it claims.
        num_payloads: present payloads that were checked.
        damage: everything that is wrong, in the order of the file's checks.
    """

    path: str
    num_samples: int
    num_payloads: int
    damage: tuple[FileDamage, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damage
