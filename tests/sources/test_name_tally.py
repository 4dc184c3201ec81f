"""Tests of what names say about the rule by which keys end."""

import pytest

from mm_assets.sources.name_tally import NameTally


def pairs(*keys: str) -> list[list[str]]:
    """A sample of a picture and a text for each key."""
    return [[f"{key}.jpg", f"{key}.txt"] for key in keys]


CAMERA = [f"IMG_2023.05.{day:02}_12.30.00" for day in range(1, 13)]
ORDINARY = pairs(*(f"{n:05}" for n in range(24)))


@pytest.mark.parametrize(
    "samples",
    [
        [[name for pair in pairs(*CAMERA) for name in pair]],
        [[f"{key}.jpg" for key in CAMERA]],
        [[f"{eye}_{key}.jpg" for key in CAMERA] for eye in ("left", "right")],
        [["a/2023.05.01.jpg", "a/2023.05.02.jpg"]],
        [["Track 2.0 (Clean Version).mp3"]],
        [["Track 2.0 (Clean Version).mp3", "Track 2.0 (Live).mp3"], ["Track 3.mp3"]],
        [["Screenshot 2023-05-01 at 12.30.00 PM.png"], ["Screenshot 2023-05-02 at 12.31.07 PM.png"]],
        [["22.05.png", "22.05.json"], *([f"{n}.png", f"{n}.json"] for n in range(23))],
        [["22.05.jpg", "22.05.txt", "22.06.jpg", "22.06.txt"]],
        [[name for who in ("doe", "roe", "poe") for name in (f"john.{who}.jpg", f"john.{who}.txt")], *ORDINARY],
        [[f"site.{name}.png" for name in ("one", "two", "three", "four", "five", "six", "seven", "eight")]],
    ],
    ids=lambda samples: samples[0][0],
)
def test_names_with_dots_of_their_own_are_noted(samples: list[list[str]]) -> None:
    """Dates, clock times, versions and people in names are noted with an example and the setting, until it is set."""
    tally, other = NameTally(), NameTally(())
    for names in samples:
        tally.add(names)
    note = tally.note()
    assert note is not None
    assert "first dot of a name" in note
    assert "`samples.roles`" in note
    assert samples[0][0] in note
    for name in (name for names in samples for name in names):
        other.add([name])
    assert other.note() is None


@pytest.mark.parametrize(
    "samples",
    [
        ORDINARY,
        [[f"{n}.left.jpg", f"{n}.right.jpg", f"{n}.depth.png", f"{n}.state.npy", f"{n}.json"] for n in range(3)],
        [["ep.left.jpg", "ep.right.jpg", "ep.depth.png", "ep.state.npy", "ep.action.npy", "ep.mp4", "ep.json"]],
        [[f"{doc}.{page}.png" for page in range(doc + 1)] + [f"{doc}.json"] for doc in range(12)],
        [[f"{doc}.{page}.png" for page in range(3)] for doc in range(12)],
        [[f"{n}.16k.wav", f"{n}.44.1k.wav", f"{n}.txt"] for n in range(3)],
        [["x.left.0.png", "x.left.1.png", "x.txt"]],
        [["README.old.txt"], *ORDINARY],
        [["a.jpg", "a.thumb.jpg", "a.txt"], *ORDINARY],
        [["model.v1.2.bin"], ["weights.2023.01.ckpt"]],
        [["a.json.gz", "a.jpg"]],
        [[]],
    ],
    ids=lambda samples: str(samples[0])[:30],
)
def test_ordinary_names_are_not_noted(samples: list[list[str]]) -> None:
    """Roles that recur, numbered pages, one long episode, strays and unknown extensions are ordinary."""
    tally = NameTally()
    for names in samples:
        tally.add(names)
    assert tally.note() is None


def test_roles_that_are_not_listed_are_noted() -> None:
    """Where keys differ only in a last part that recurs, the setting lacks these roles; listed, nothing is said."""
    names = [f"img.2023.05.{n:02}.{role}.jpg" for n in range(20) for role in ("rgb", "depth")]
    tally = NameTally(())
    for name in names:
        tally.add([name])
    note = tally.note()
    assert note is not None
    assert "'depth, rgb'" in note
    assert "`samples.roles`" in note
    tally = NameTally(("rgb", "depth"))
    for number in range(20):
        tally.add(names[2 * number : 2 * number + 2])
    assert tally.note() is None


def test_members_that_belong_to_other_keys_do_not_count() -> None:
    """Members that an interleaved sample names are those of another sample."""
    tally = NameTally()
    tally.add(["doc.json", *(f"img{n}.2023.05.01.jpg" for n in range(9))])
    assert tally.note() is None
