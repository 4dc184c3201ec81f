"""One partition, started on two hosts with homes of their own: by claims one works, and without them nothing breaks."""

import re
from pathlib import Path

import pytest

from ..s3_server import ServerApart
from .hosts import MAIN, WAIT, Corpus, Project, object_files, wait_for
from .ray_cluster import as_host, can_isolate

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not can_isolate(), reason="hosts need namespaces: unshare is missing, or no root"),
]

KEY = "001"
SECONDS = 12.0  # that the first host takes: the second one has started by then
# Of 45 seconds; a claim is renewed by a load that takes longer.
SHORT = "from mm_assets.pipeline.state import claims; claims.CLAIM_SECONDS = 9.0\n"
NONE = """
from mm_assets.pipeline.state.claims import Claims
Claims.others = lambda self: []
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, host_environment: dict[str, str]) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("corpus"), 3, environment=host_environment)


@pytest.fixture(params=["local", "s3"])
def project(request: pytest.FixtureRequest, corpus: Corpus, tmp_path: Path, object_store: ServerApart) -> Project:
    """An empty root."""
    if request.param == "local":
        return Project(corpus, tmp_path)
    bucket = tmp_path.name.replace("_", "-").lower()[-50:].strip("-")
    object_files(object_store.url).mkdir(bucket)
    return Project(corpus, tmp_path, root=f"s3://{bucket}/root")


def packed(project: Project) -> dict[str, str]:
    """Digests of the partition's files."""
    return {name: digest for name, digest in project.contents().items() if f"/{KEY}." in name}


def run_twice(corpus: Corpus, project: Project, code: str) -> tuple[int, str]:
    """Runs the partition on two hosts, on the second when it is at work on the first; how the second one ended."""
    arguments = ("run", "--partition", KEY)
    with project.start(*arguments, home="one", prefix=as_host("first"), code=code) as first:
        wait_for(corpus.noted, "work on the first host")
        with project.start(*arguments, home="two", prefix=as_host("second"), code=code) as second:
            assert "1 partition run" in first.ended()
            return second.process.wait(WAIT), second.said


def test_one_works_and_the_other_waits(corpus: Corpus, project: Project) -> None:
    """The second host waits for as long as the first one renews its claim, and takes what it publishes: both exit 0."""
    corpus.order(seconds=SECONDS)
    code, said = run_twice(corpus, project, SHORT + MAIN)
    assert code == 0, said
    assert [note.host for note in corpus.noted()] == ["first"]
    assert project.records() == [KEY]
    assert re.search(r"1 partition claimed by a load on first.*: waiting for it", said)


def test_without_claims_the_files_are_the_same(corpus: Corpus, project: Project) -> None:
    """Claims save work and nothing else: two hosts that make one partition at the same time make the same bytes."""
    corpus.order()
    project.run("run", "--partition", KEY)
    expected = packed(project)
    other = Project(corpus, project.folder / "other", root=f"{project.root}2")
    corpus.order(together=2)
    code, said = run_twice(corpus, other, NONE + MAIN)
    assert code == 0, said
    assert {note.host for note in corpus.noted()} == {"first", "second"}
    assert packed(other) == expected
