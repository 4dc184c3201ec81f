"""Systems without POSIX calls: their absence is simulated, since CI runs on Linux alone."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mm_assets
from mm_assets.fields import ImageField, TextField

# What Windows does not have of the modules and calls that reading or writing could use.
WITHOUT_POSIX = """
import mmap, os, sys
for module in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[module] = None
MISSING = (
    "O_CLOEXEC O_DIRECTORY O_NOFOLLOW RWF_NOWAIT copy_file_range fork posix_fadvise posix_fallocate pread preadv "
    "pwrite pwritev register_at_fork sched_getaffinity sendfile"
)
for name in MISSING.split():
    delattr(os, name)
for name in [name for name in dir(mmap) if name.startswith(("MADV_", "MAP_", "PROT_"))]:
    delattr(mmap, name)
"""

READ = """
import numpy as np
import mm_assets
for path in sys.argv[1:]:
    with mm_assets.open(path, verify=True) as data:
        assert data.read_sample(3)["text"] == "text 3"
        assert data.read_batch(range(8), ["text"], threads=None)["text"].values[7] == "text 7"
        assert [bytes(one) for one in data.read_raw([5, 1], ["text"])["text"]] == [b"text 5", b"text 1"]
        assert sum(len(block["text"]) for block in data.stream_raw(modalities=["text"])) == 8
        assert len(list(data.stream_raw([[0, 1], [2]]))) == 2
        assert data.verify().damage == ()
    with mm_assets.open(path) as data:
        loader = mm_assets.MultimodalLoader(data, batch_size=4)
        assert sum(len(batch["text"]) for batch in loader) == 8
        assert np.array_equal(data[2]["image"], np.full((4, 4, 3), 2, np.uint8))
try:
    mm_assets.create("new.mult", {"text": mm_assets.fields.TextField()})
except OSError as error:
    assert "new.mult" in str(error) and "fcntl" in str(error), error
else:
    raise AssertionError("a file was created without a lock")
print("read")
"""


@pytest.fixture
def packed(tmp_path: Path) -> list[str]:
    """The same eight samples in both formats."""
    paths = [str(tmp_path / name) for name in ("a.mult", "a.mstr")]
    for path in paths:
        with mm_assets.create(path, {"image": ImageField(encoding="png"), "text": TextField()}) as writer:
            for i in range(8):
                writer.write(f"id{i}", {"image": np.full((4, 4, 3), i, np.uint8), "text": f"text {i}"})
    return paths


def test_local_files_are_read_without_posix(packed: list[str], tmp_path: Path) -> None:
    """Without file locks, limits, advice and positioned reads, both formats are read, and writing names what lacks."""
    script = WITHOUT_POSIX + READ
    done = subprocess.run(
        [sys.executable, "-c", script, *packed], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.stdout == "read\n", done.stderr
    assert not (tmp_path / "new.mult").exists()


def test_a_star_import_leaves_the_builtin_open() -> None:
    """`from mm_assets import *` does not replace `open`, and `mm_assets.open` is there."""
    names: dict[str, object] = {}
    exec("from mm_assets import *", names)
    assert "open" not in names
    assert names["Dataset"] is mm_assets.Dataset
    assert callable(mm_assets.open)
