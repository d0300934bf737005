"""Texts that must not appear: exact, by bytes, whatever tokens would spell them.

Tokens are pieces of bytes, and a text can be cut into them in many ways; forbidding one way of writing a word leaves
the others open. So what is forbidden is the word's UTF-8 in the output's bytes. A token would complete the word when

    it holds the word whole                                                                  (always forbidden), or
    the output ends in the word's first i bytes, and the token begins with all the others    (for each such i).

Tokens that begin with given bytes are a range of the sorted vocabulary, found by bisection. Those that hold them are
found by searching one string of all tokens, parted by 0xFF: that byte is in no UTF-8, so no word is found across two
tokens. Only the output counts: a word that the prompt began is not known here. An end token has no bytes and is never
forbidden.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from collections.abc import Sequence as Ordered

import numpy as np

from engines.runtime.text_stream import TokenBytes

_APART = b"\xff"


class Spellings:
    """A vocabulary's tokens as bytes, for finding. Made when bad words are first asked for."""

    def __init__(self, tokenizer: TokenBytes, size: int) -> None:
        self.of = [b"" if index in tokenizer.special_ids else tokenizer.id_to_bytes(index) for index in range(size)]
        self._order = sorted(range(size), key=self.of.__getitem__)
        self._sorted = [self.of[index] for index in self._order]
        self._all = _APART.join(self.of)
        self._starts = np.cumsum([0, *(len(token) + 1 for token in self.of[:-1])])

    def beginning(self, part: bytes) -> np.ndarray:
        """Ids of the tokens that begin with ``part``, int64."""
        first = bisect.bisect_left(self._sorted, part)
        last = bisect.bisect_left(self._sorted, True, first, key=lambda token: not token.startswith(part))
        return np.array(self._order[first:last], np.int64)

    def holding(self, word: bytes) -> np.ndarray:
        """Ids of the tokens that hold ``word`` anywhere, int64."""
        places: list[int] = []
        at = self._all.find(word)
        while at >= 0:
            places.append(at)
            at = self._all.find(word, at + 1)
        return np.unique(np.searchsorted(self._starts, places, side="right") - 1)


class BadWords:
    """The words of one request. It has no state: what may follow is a function of the output."""

    def __init__(self, words: Iterable[str], spellings: Spellings) -> None:
        self._spellings = spellings
        self._words = [word.encode() for word in words]
        self._longest = max(map(len, self._words))
        self._whole = np.unique(np.concatenate([spellings.holding(word) for word in self._words]))
        self._ends = {word[at:]: spellings.beginning(word[at:]) for word in self._words for at in range(1, len(word))}

    def banned(self, generated: Ordered[int]) -> np.ndarray:
        """Ids that must not follow the tokens generated so far, int64."""
        tail = self._tail(generated)
        found = [self._whole]
        for word in self._words:
            found += [self._ends[word[at:]] for at in range(1, len(word)) if tail.endswith(word[:at])]
        return np.concatenate(found)

    def _tail(self, generated: Ordered[int]) -> bytes:
        """The last bytes of the output: one less than the longest word has, or all."""
        pieces: list[bytes] = []
        room = self._longest - 1
        for token in reversed(generated):
            if room <= 0:
                break
            pieces.append(self._spellings.of[token])
            room -= len(pieces[-1])
        return b"".join(reversed(pieces))
