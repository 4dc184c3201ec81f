"""Files that are hashed while they are written."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.storage.hashed_file import HashedFile
from mm_assets.storage.store import Store


@given(st.lists(st.binary(max_size=300), max_size=30), st.sampled_from([0, 5 << 20]))
@settings(max_examples=60)
def test_digest_is_that_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[bytes], num_large: int
) -> None:
    """Whatever the blocks are, the file holds them in order and the digest is that of its bytes."""
    path = tmp_path_factory.mktemp("hashed") / "file"
    blocks = [*blocks, bytes(num_large)]
    with HashedFile(path) as file:
        assert sum(map(file.write, blocks)) == sum(map(len, blocks))
    assert path.read_bytes() == b"".join(blocks)
    assert file.sha256 == hashlib.sha256(b"".join(blocks)).hexdigest()


@pytest.mark.parametrize("size", [1, 5 << 20])
def test_a_block_that_cannot_be_hashed_ends_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """When memory is missing for the digest, the writer gets that error, and does not wait for ever."""

    class Full:
        def update(self, _: object) -> None:
            raise MemoryError

    monkeypatch.setattr(hashlib, "sha256", Full)
    file = HashedFile(tmp_path / "file")

    def write() -> None:
        with file:
            for _ in range(20):
                file.write(bytes(size))

    with pytest.raises(MemoryError):
        write()
    assert file.closed


def test_published_digest_follows_a_later_change(tmp_path: Path) -> None:
    """A draft that was changed after it had been hashed is published with the digest of what it is then."""
    store = Store(str(tmp_path))
    with store.draft("a") as draft:
        with draft.hashed() as file:
            file.write(b"first")
        draft.path.write_bytes(b"second")
    assert draft.result().sha256 == hashlib.sha256(b"second").hexdigest() == store.digest("a")


def test_state_changes_with_each_write(tmp_path: Path) -> None:
    """A file that was written again with as many bytes has another state; one that is missing has none."""
    store = Store(str(tmp_path))
    store.write_bytes("a", b"first")
    before = store.state("a")
    assert before is not None
    assert store.state("a") == before
    store.write_bytes("a", b"other")
    assert store.state("a") != before
    assert store.state("b") is None
