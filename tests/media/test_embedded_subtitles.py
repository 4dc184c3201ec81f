"""Subtitles in MP4 and Matroska files: tracks, texts, times, markup, and damage."""

import pytest

from mm_assets.errors import MediaError
from mm_assets.media.embedded_subtitles import embedded_subtitles, subtitle_tracks

from .subtitled import subtitled

CUES = ((100, 400, "Hello"), (700, 500, "<i>Grüße</i>\nzwei & drei"))


@pytest.mark.parametrize(
    ("container", "codec", "name", "second"),
    [
        ("mp4", "mov_text", "mov_text", "<i>Grüße</i>\nzwei & drei"),
        ("matroska", "subrip", "subrip", "Grüße\nzwei & drei"),
        ("matroska", "webvtt", "webvtt", "Grüße\nzwei & drei"),
    ],
)
def test_a_track_has_its_texts_and_times(container: str, codec: str, name: str, second: str) -> None:
    """Cues have their times in seconds; markup is removed where the codec has any, and gaps are not cues."""
    film = subtitled(container, codec, [("eng", CUES), ("deu", CUES[:1])])
    first, other = subtitle_tracks(film)
    assert (first.codec, first.language, other.language) == (name, "eng", "deu")
    assert embedded_subtitles(film, first.number) == [(0.1, 0.5, "Hello"), (0.7, 1.2, second)]
    assert embedded_subtitles(film, other.number) == [(0.1, 0.5, "Hello")]


def test_a_film_without_subtitles_has_no_track() -> None:
    """There is no track, and none can be read."""
    film = subtitled("mp4", "mov_text", [])
    assert subtitle_tracks(film) == []
    with pytest.raises(LookupError, match="no track of subtitles 0"):
        embedded_subtitles(film, 0)


def test_a_damaged_film_is_a_media_error() -> None:
    """Whatever byte of the header changes, there are cues, none, or a `MediaError`."""
    film = subtitled("matroska", "subrip", [("eng", CUES)])
    for at in range(0, min(len(film), 1200), 13):
        damaged = film[:at] + bytes([film[at] ^ 0xFF]) + film[at + 1 :]
        try:
            for track in subtitle_tracks(damaged):
                assert all(end >= start >= 0 for start, end, _ in embedded_subtitles(damaged, track.number))
        except (MediaError, LookupError):
            continue
