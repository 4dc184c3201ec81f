"""The cache of thumbnails, and how many requests are answered at a time."""

import asyncio
import io
import threading
from concurrent.futures import CancelledError

import pytest
from PIL import Image

from mm_assets.display import Content, Item, content_item
from mm_assets.errors import SourceError
from mm_assets.view.backends import Picture
from mm_assets.view.guard import MAX_IN_FLIGHT, Guard
from mm_assets.view.thumbnails import THREADS, Thumbnails

PATIENCE = 60


def picture(shade: int, made: list[int]) -> Picture:
    """A picture whose making is noted."""
    out = io.BytesIO()
    Image.new("RGB", (40, 30), (shade, 0, 0)).save(out, "PNG")

    def item():
        made.append(shade)
        return content_item("x.png", Content.of(out.getvalue()))

    return Picture(identity=str(shade), items=(item,))


def test_a_picture_is_made_once() -> None:
    """The second request for a content is answered from the cache, also that there is no picture of it."""
    made: list[int] = []
    thumbnails = Thumbnails()
    first = thumbnails.get("1", lambda: picture(1, made)).result(PATIENCE)
    assert first is not None
    assert first.startswith(b"\xff\xd8")
    assert thumbnails.get("1", lambda: picture(1, made)).result(PATIENCE) == first
    assert made == [1]
    none = Picture(identity="2", items=(lambda: content_item("x.txt", Content.of(b"words")),))
    assert thumbnails.get("2", lambda: none).result(PATIENCE) is None
    assert thumbnails.get("2", lambda: picture(3, made)).result(PATIENCE) is None
    thumbnails.close()


def test_an_item_without_a_picture_leaves_it_to_the_next() -> None:
    """The first item that has a picture is taken."""
    words = content_item("x.txt", Content.of(b"words"))
    chosen = Picture(identity="1", items=(lambda: words, *picture(1, []).items))
    thumbnails = Thumbnails()
    assert thumbnails.get("1", lambda: chosen).result(PATIENCE) is not None
    thumbnails.close()


def test_the_cache_is_bounded_by_bytes() -> None:
    """However many pictures are made, the cached ones stay below the limit, the latest of them cached."""
    made: list[int] = []
    thumbnails = Thumbnails(cached_bytes=5000)
    for shade in range(40):
        thumbnails.get(str(shade), lambda shade=shade: picture(shade, made)).result(PATIENCE)
        assert thumbnails.cached_bytes <= 5000
    thumbnails.get("39", lambda: picture(39, made)).result(PATIENCE)
    thumbnails.get("0", lambda: picture(0, made)).result(PATIENCE)
    assert made == [*range(40), 0]
    thumbnails.close()


def test_the_next_page_comes_before_the_rest_of_the_last_one() -> None:
    """What was begun ahead for a page that has been left is given up, but not what a request waits for."""
    made: list[int] = []
    blocked = threading.Event()
    thumbnails = Thumbnails()

    def waiting() -> Picture:
        blocked.wait(PATIENCE)
        return picture(0, [])

    for n in range(THREADS):
        thumbnails.get(f"blocked {n}", waiting)
    thumbnails.prefetch({str(shade): lambda shade=shade: picture(shade, made) for shade in range(1, 5)})
    asked = thumbnails.get("2", lambda: picture(2, made))
    thumbnails.prefetch({"9": lambda: picture(9, made)})
    blocked.set()
    assert asked.result(PATIENCE) is not None
    assert thumbnails.get("9", lambda: picture(9, made)).result(PATIENCE) is not None
    assert sorted(made) == [2, 9]
    thumbnails.close()


def test_an_error_is_raised_and_not_cached() -> None:
    """A picture that could not be read is tried again by the next request."""
    thumbnails = Thumbnails()

    def failing() -> Picture:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        thumbnails.get("1", failing).result(PATIENCE)
    assert thumbnails.get("1", lambda: picture(1, [])).result(PATIENCE) is not None
    thumbnails.close()


def test_content_that_could_not_be_read_is_tried_again() -> None:
    """One item that cannot be read leaves the picture to the next; where none has one, nothing is cached."""

    def failing() -> Item:
        raise SourceError("s3://bucket/x.tar", "the connection was reset")

    thumbnails = Thumbnails()
    chosen = Picture(identity="1", items=(failing, *picture(1, []).items))
    assert thumbnails.get("1", lambda: chosen).result(PATIENCE) is not None
    with pytest.raises(SourceError, match="reset"):
        thumbnails.get("2", lambda: Picture(identity="2", items=(failing,))).result(PATIENCE)
    assert thumbnails.get("2", lambda: picture(2, [])).result(PATIENCE) is not None
    thumbnails.close()


def test_closing_gives_up_what_waits() -> None:
    """Pictures that have not been begun are cancelled when the viewer ends."""
    blocked = threading.Event()
    thumbnails = Thumbnails()
    for n in range(THREADS):
        thumbnails.get(f"blocked {n}", lambda: (blocked.wait(PATIENCE), picture(0, []))[1])
    late = thumbnails.get("late", lambda: picture(1, []))
    thumbnails.close()
    blocked.set()
    with pytest.raises(CancelledError):
        late.result(PATIENCE)


def test_one_request_too_many_is_told_to_come_again() -> None:
    """While the most requests are being answered, a further one is 503 with a time, and after them one is answered."""

    async def play() -> list[int]:
        go_on = asyncio.Event()

        async def slow(scope, receive, send) -> None:
            await go_on.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        guard = Guard(slow, token="t")
        cookie = f"{guard.cookie}=t".encode()
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/x",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"cookie", cookie)],
        }
        statuses: list[int] = []

        async def send(message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        async def receive():
            return {"type": "http.request", "body": b""}

        tasks = [asyncio.create_task(guard(dict(scope), receive, send)) for _ in range(MAX_IN_FLIGHT)]
        await asyncio.sleep(0)
        await guard(dict(scope), receive, send)
        go_on.set()
        await asyncio.gather(*tasks)
        await guard(dict(scope), receive, send)
        return statuses

    assert asyncio.run(play()) == [503, *[200] * (MAX_IN_FLIGHT + 1)]
