"""Streams of text: whole characters only, nothing of a stop string, the same as the whole decode."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.runtime.text_stream import TextStream


class Bytes:
    """Token i is byte i; 256 is special. With ``drops_space`` the first token's leading space is dropped."""

    special_ids = frozenset({256})

    def __init__(self, drops_space: bool = False) -> None:
        self.drops_space = drops_space

    def id_to_bytes(self, index: int) -> bytes:
        return bytes([index])

    def decode(self, ids: Sequence[int]) -> str:
        text = bytes(index for index in ids if index != 256).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.drops_space else text


def run(data: bytes, stops: Sequence[str | bytes] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(Bytes(), stops)
    pieces = []
    for byte in data:
        pieces.append(stream.push(byte))
        if stream.stopped:
            return pieces, stream
    pieces.append(stream.finish())
    return pieces, stream


def test_no_piece_of_a_character_is_shown() -> None:
    pieces, stream = run("aé漢🙂z".encode())
    assert pieces == ["a", "", "é", "", "", "漢", "", "", "", "🙂", "z", ""]
    assert stream.text == "aé漢🙂z"


def test_an_unfinished_character_becomes_the_replacement_at_the_end_only() -> None:
    pieces, _ = run("a🙂".encode()[:-1])
    assert "".join(pieces[:-1]) == "a"
    assert pieces[-1] == "\ufffd"


def test_a_stop_string_is_never_shown_not_even_its_beginning() -> None:
    pieces, stream = run(b"one STOP two", ["STOP"])
    assert stream.stopped
    assert "".join(pieces) == "one "
    assert "S" not in "".join(pieces)
    pieces, stream = run(b"one STO", ["STOP"])
    assert not stream.stopped
    assert "".join(pieces) == "one STO"
    assert "".join(pieces[:-1]) == "one "


def test_stop_strings_may_be_prefixes_of_each_other_and_cross_characters() -> None:
    assert "".join(run(b"x ab", ["abc", "ab"])[0]) == "x "
    assert "".join(run("wörter".encode(), ["ört"])[0]) == "w"
    assert "".join(run(b"aab", ["ab"])[0]) == "a"


def test_a_stop_may_be_bytes_that_are_no_text() -> None:
    for data, stop, shown in ((b"ab\xff\xfecd", b"\xff\xfe", "ab"), (b"a\x00b", b"\x00", "a"),
                              ("a漢b".encode(), "漢".encode()[1:2], "a\ufffd"), (b"x\xffy", b"\xff\xfe", "x\ufffdy")):
        pieces, stream = run(data, [stop])
        assert "".join(pieces) == stream.text == shown
        assert stream.stopped == (stop in data)


def test_a_stop_beside_broken_bytes_is_found() -> None:
    pieces, stream = run(b"\xe6ab", ["ab"])
    assert ("".join(pieces), stream.stopped) == ("\ufffd", True)


def test_below_min_tokens_a_stop_is_ignored_and_cannot_finish_later() -> None:
    stream = TextStream(Bytes(), ["ab"])
    out = stream.push(ord("a"), may_stop=False) + stream.push(ord("b"))
    assert (out, stream.stopped) == ("ab", False)


def test_special_tokens_give_no_text_and_the_leading_space_follows_the_tokenizer() -> None:
    for drops, expected in ((False, " a b"), (True, "a b")):
        stream = TextStream(Bytes(drops))
        out = "".join(stream.push(token) for token in (256, *b" a b")) + stream.finish()
        assert out == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=4).map(str.encode), st.binary(max_size=3)), max_size=12))
def test_the_stream_equals_the_whole_decode(parts: list[bytes]) -> None:
    data = b"".join(parts)
    assert "".join(run(data)[0]) == data.decode("utf-8", "replace")


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_text_ends_before_the_first_stop(text: str, stops: list[str]) -> None:
    pieces, stream = run(text.encode(), stops)
    shown = "".join(pieces)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stream.stopped == bool(ends)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if ends:  # it stops at the first moment that a stop string is complete
        done = text[:min(ends)]
        assert shown == done[:min(done.find(stop) for stop in stops if stop in done)]
    else:
        assert shown == text


@pytest.mark.parametrize("stops", [[], ["zz"]])
def test_nothing_is_held_back_that_need_not_be(stops: list[str]) -> None:
    pieces, _ = run(b"abc", stops)
    assert pieces == ["a", "b", "c", ""]
