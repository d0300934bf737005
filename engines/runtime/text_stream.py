"""Token ids to text, one token at a time: no partial character, no piece of a stop.

Tokens are pieces of bytes, not of characters, and so are stops: a stop string is its UTF-8. Bytes are held back as long
as they may be the beginning of a stop; when one appears, the text ends before it. What is given out passes an
incremental UTF-8 decoder that keeps an unfinished character back until it is complete; U+FFFD appears only where the
whole decode has it.

Special tokens give no text. A SentencePiece tokenizer drops the first token's leading space; so does the stream.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What is needed of a tokenizer (``calib.text.Tokenizer`` has it)."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def id_to_bytes(self, index: int) -> bytes: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def _held(data: bytes, stops: Sequence[bytes]) -> int:
    """Length of the longest suffix of ``data`` that is a proper prefix of a stop."""
    if not stops:
        return 0
    longest = min(len(data), max(len(stop) for stop in stops))
    for length in range(longest, 0, -1):
        tail = data[len(data) - length:]
        if any(len(stop) > length and stop.startswith(tail) for stop in stops):
            return length
    return 0


class TextStream:
    """The text of one sequence. ``push`` a token, take what may be shown; ``finish`` flushes the rest."""

    __slots__ = ("_decoder", "_first", "_pending", "_stops", "_tokenizer", "stopped", "text")

    def __init__(self, tokenizer: TokenBytes, stops: Sequence[str | bytes] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stop.encode() if isinstance(stop, str) else stop for stop in stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        self._pending = b""
        #: All text given out so far.
        self.text = ""
        self.stopped = False

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Add a token; returns the text that is now safe to show. ``stopped`` is set when a stop appeared.

        With ``may_stop`` False (below min_tokens) stops are not looked for and what there is so far cannot become a
        part of one later. A stop within a character leaves U+FFFD for what was before it.
        """
        self._pending += self._bytes(token)
        if not may_stop:
            return self._give(len(self._pending))
        found = [place for stop in self._stops if (place := self._pending.find(stop)) >= 0]
        if found:
            self.stopped = True
            out = self._give(min(found), last=True)
            self._pending = b""
            return out
        return self._give(len(self._pending) - _held(self._pending, self._stops))

    def finish(self) -> str:
        """The end of the sequence: what was held back, and U+FFFD for an unfinished character."""
        return "" if self.stopped else self._give(len(self._pending), last=True)

    def _give(self, length: int, *, last: bool = False) -> str:
        out = self._decoder.decode(self._pending[:length], final=last)
        self._pending = self._pending[length:]
        self.text += out
        return out

    def _bytes(self, token: int) -> bytes:
        if token in self._tokenizer.special_ids:
            return b""
        piece = self._tokenizer.id_to_bytes(token)
        if self._first and piece:
            self._first = False
            if piece.startswith(b" ") and not self._tokenizer.decode([token]).startswith(" "):
                return piece[1:]
        return piece
