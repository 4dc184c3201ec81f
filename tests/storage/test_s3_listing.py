"""Listings of S3: what the parser of this project makes of an answer is what the client's own makes of it."""

from __future__ import annotations

import asyncio
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("aiobotocore")

from aiobotocore.parsers import AioResponseParserFactory
from aiobotocore.session import AioSession
from botocore.session import Session

from mm_assets.storage import s3_listing
from mm_assets.storage.s3_listing import list_objects, listing_session

SHAPE = Session().get_service_model("s3").operation_model("ListObjectsV2").output_shape
# What XML can hold; the store encodes the rest.
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff"))


def parsed(factory: AioResponseParserFactory, body: str) -> Any:
    response = {"body": body.encode(), "headers": {}, "status_code": 200, "context": {}}
    return asyncio.run(factory.create_parser("rest-xml").parse(response, SHAPE))


def both(body: str) -> tuple[Any, Any]:
    """What the parser of this project makes of an answer, and the client's own."""
    ours = listing_session().get_component("response_parser_factory")
    return parsed(ours, body), parsed(AioResponseParserFactory(), body)


def listing(entries: str, *, more: str = "") -> str:
    namespace = quoteattr("http://s3.amazonaws.com/doc/2006-03-01/")
    head = f"<Name>b</Name><Prefix>p/</Prefix><KeyCount>1</KeyCount><IsTruncated>true</IsTruncated>{more}"
    body = f"<ListBucketResult xmlns={namespace}>{head}{entries}</ListBucketResult>"
    return f"<?xml version='1.0' encoding='UTF-8'?>\n{body}"


def entry(key: str, size: int = 1, more: str = "") -> str:
    when = "<LastModified>2026-11-24T10:20:30.123Z</LastModified>"
    return (
        f"<Contents><Key>{escape(key)}</Key>{when}<ETag>&quot;abc-2&quot;</ETag><Size>{size}</Size>"
        f"<StorageClass>STANDARD</StorageClass>{more}</Contents>"
    )


@settings(deadline=None)  # the first call imports the client
@given(st.lists(st.tuples(NAMES, st.integers(0, 2**50)), max_size=5), NAMES)
def test_any_names_and_sizes(entries: list[tuple[str, int]], token: str) -> None:
    """Names with any characters, sizes, tags, times, folders and the token of the next page are equal."""
    more = f"<NextContinuationToken>{escape(token)}</NextContinuationToken>"
    more += "<CommonPrefixes><Prefix>p/a/</Prefix></CommonPrefixes>"
    ours, theirs = both(listing("".join(entry(*each) for each in entries), more=more))
    assert ours == theirs


@pytest.mark.parametrize(
    "more",
    [
        "<ChecksumAlgorithm>CRC64NVME</ChecksumAlgorithm><ChecksumType>FULL_OBJECT</ChecksumType>",
        "<Owner><ID>1</ID><DisplayName>n</DisplayName></Owner>",
        "<ChecksumAlgorithm>CRC32C</ChecksumAlgorithm><ChecksumAlgorithm>SHA1</ChecksumAlgorithm>",
        "<RestoreStatus><IsRestoreInProgress>false</IsRestoreInProgress></RestoreStatus>",
        "<Unknown/>",
    ],
)
def test_elements_that_not_every_entry_has(more: str) -> None:
    """Checksums are equal; entries with elements that are not known, nested or repeated are parsed by the client."""
    ours, theirs = both(listing(entry("a&b") + entry("c", more=more)))
    assert ours == theirs
    assert [found["Key"] for found in ours["Contents"]] == ["a&b", "c"]


def test_nothing_is_listed_as_nothing() -> None:
    """An empty page has no contents."""
    ours, theirs = both(listing(""))
    assert ours == theirs
    assert "Contents" not in ours


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (listing(entry("a")), 200),
        (listing(entry("a"))[:-9], 500),
        ("<Error><Code>InternalError</Code></Error>", 500),
        ("", 200),
    ],
)
def test_an_error_with_status_200_is_still_one(body: str, status: int) -> None:
    """What is not a whole listing, the client takes for an error of the server, which it asks again."""
    operation = Session().get_service_model("s3").operation_model("ListObjectsV2")

    async def handled(session: AioSession) -> Any:
        answer = {"body": body.encode(), "headers": {}, "status_code": 200, "context": {}}
        emitter = session.get_component("event_emitter")
        given = {"operation_model": operation, "response_dict": answer, "customized_response_dict": {}}
        await emitter.emit("before-parse.s3.ListObjectsV2", **given)
        return answer["status_code"]

    assert [asyncio.run(handled(session)) for session in (listing_session(), AioSession())] == [status, status]


class Bucket:
    """A file system of one bucket that answers `list_objects_v2` as S3 does, a few objects per page."""

    req_kw: dict[str, str] = {}

    def __init__(self, keys: set[str], page: int) -> None:
        self.keys = sorted(keys)
        self.page = page

    def split_path(self, path: str) -> tuple[str, str, None]:
        bucket, _, key = path.partition("/")
        return bucket, key, None

    def call_s3(self, method: str, **request: str) -> dict[str, Any]:
        assert (method, request["Bucket"]) == ("list_objects_v2", "bucket")
        prefix, delimiter = request["Prefix"], request.get("Delimiter", "")
        after = request.get("ContinuationToken") or request.get("StartAfter", "")
        found: dict[str, Any] = {"Contents": [], "CommonPrefixes": []}
        last = ""
        for key in self.keys:
            if not key.startswith(prefix):
                continue
            folder, is_folder, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            item = f"{prefix}{folder}{delimiter}" if is_folder else key
            if item <= after or item == last:
                continue
            if len(found["Contents"]) + len(found["CommonPrefixes"]) == self.page:
                return {**found, "IsTruncated": True, "NextContinuationToken": last}
            if is_folder:
                found["CommonPrefixes"].append({"Prefix": item})
            else:
                found["Contents"].append({"Key": key, "Size": len(key), "ETag": '"tag"'})
            last = item
        return {**found, "IsTruncated": False}


KEYS = st.sets(st.text("ab/~", min_size=1, max_size=4), max_size=30).map(lambda keys: {f"in/{key}" for key in keys})


@given(KEYS, KEYS, st.integers(1, 5), st.booleans())
def test_ranges_between_known_names_miss_nothing(
    keys: set[str], known: set[str], page: int, is_recursive: bool
) -> None:
    """Whatever names were known before, every object in the folder is listed once, in order, and no other."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(s3_listing, "_PAGE", 2)  # else thousands of names make a range
        listed = list(
            list_objects(
                Bucket({*keys, "a", "inside", "other/b"}, page),
                "bucket/in",
                is_recursive=is_recursive,
                known=sorted(f"bucket/{key}" for key in known),
            )
        )
    wanted = sorted(key for key in keys if is_recursive or "/" not in key.removeprefix("in/"))
    assert [info["name"] for info in listed] == [f"bucket/{key}" for key in wanted]
    assert all(info["size"] == len(info["name"]) - len("bucket/") and info["type"] == "file" for info in listed)
