"""Operations that need every header field get them all, and operations that do not need them pay nothing."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.server.http1.bounds import HttpConfig, Intake, Rejection
from tidegate.server.http1.reader import RequestReader
from tidegate.server.http1.repeats import RequestHead
from tidegate.server.messages import Answer, Head, Route, Router, Whole


class Sink:
    def __init__(self) -> None:
        self.heads: list[RequestHead] = []
        self.rejected: list[Rejection] = []

    def peer(self) -> str:
        return "192.0.2.1"

    def on_begin(self) -> None: ...

    def on_continue(self) -> None: ...

    def on_request(self, head: RequestHead, body: bytes) -> None:
        self.heads.append(head)

    def on_rejected(self, rejection: Rejection) -> None:
        self.rejected.append(rejection)


def handle(_head: Head, _body: bytes) -> Answer:
    return 200, b"", b""


def refuse(
    status: int, detail: str, accept: bytes, *, lines: bytes = b"", request_id: str | None = None
) -> Answer:
    return status, lines, detail.encode()


ROUTER = Router(
    [
        Route("GET", "/plain", "plain", handle),
        Route("GET", "/whole", "whole", handle, reads_whole=True),
        Route("GET", "/under/*", "under", handle, reads_whole=True),
    ],
    refuse,
)


def reader() -> tuple[RequestReader, Sink]:
    sink = Sink()
    return RequestReader(Intake(HttpConfig()), ROUTER, sink), sink


names = st.sampled_from(["X-User", "x-user", "Accept", "X-Forwarded-For", "User-Agent"])
values = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x2FF, exclude_characters="\x7f"), max_size=20
)


@given(fields=st.lists(st.tuples(names, values), max_size=10), cuts=st.lists(st.integers(1, 30), max_size=5))
def test_a_whole_head_has_every_field_in_order_however_it_arrives(
    fields: list[tuple[str, str]], cuts: list[int]
) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
    data = f"GET /whole?a=%20b HTTP/1.1\r\nHost: h\r\n{lines}\r\n".encode()
    expected: dict[str, str] = {"host": "h"}
    for name, value in fields:
        known = expected.get(name.lower())
        expected[name.lower()] = value if known is None else f"{known},{value}"
    parse, sink = reader()
    for cut in cuts:
        parse.feed(data[:cut])
        data = data[cut:]
    if data:
        parse.feed(data)
    (head,) = sink.heads
    assert head.fields.whole == Whole(b"/whole?a=%20b", expected, "192.0.2.1")


def test_a_value_that_is_not_utf_8_is_read_as_latin_1() -> None:
    parse, sink = reader()
    parse.feed(b"GET /whole HTTP/1.1\r\nHost: h\r\nX-User: \xe9\r\n\r\n")
    whole = sink.heads[0].fields.whole
    assert whole is not None
    assert whole.fields["x-user"] == "\xe9"


def test_a_whole_head_is_not_remembered() -> None:
    """It may hold a hundred small texts, which take several times the memory of the bytes that are counted."""
    for path, is_repeatable in (("/plain", True), ("/whole", False), ("/under/it", False)):
        parse, _ = reader()
        data = f"GET {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode()
        parse.feed(data)
        assert (parse.repeatable(data) is not None) == is_repeatable


@pytest.mark.parametrize("is_complete", [False, True])
def test_fields_that_no_operation_needs_are_not_kept(is_complete: bool) -> None:
    def cost(path: str) -> int:
        readers = [reader() for _ in range(20)]
        tracemalloc.start()
        for parse, _ in readers:
            parse.feed(f"GET {path} HTTP/1.1\r\nHost: h\r\n".encode())
            for number in range(25):
                parse.feed(f"X-{number}: {'x' * 1_000}\r\n".encode())
            if is_complete:
                parse.feed(b"\r\n")
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return held // 20

    assert cost("/plain") < 10_000
    # Kept for this operation, and bounded by the size of a head.
    assert 25_000 < cost("/whole") < 3 * HttpConfig().header_bytes_max


def test_a_path_with_a_star_takes_all_that_begin_so_and_no_others() -> None:
    for path, name in (
        (b"/under/", "under"),
        (b"/under/a/b?c", "under"),
        (b"/under/../plain", "under"),
        (b"/under", "unknown"),
        (b"/underneath", "unknown"),
        (b"/plain/", "unknown"),
    ):
        assert ROUTER.find(b"GET", path).name == name, path
    status, lines, _ = handler_answer(b"POST", b"/under/x")
    assert (status, lines) == (405, b"allow: GET, HEAD\r\n")


def handler_answer(method: bytes, target: bytes) -> Answer:
    answer = ROUTER.find(method, target).handler(Head(), b"")
    assert isinstance(answer, tuple)
    return answer
