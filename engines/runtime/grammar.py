"""Text that must match: a JSON schema, a regular expression or a Lark grammar, as masks over the vocabulary.

The one file that imports llguidance, which walks an Earley parser over derivatives of regular expressions and gives,
for each state, the tokens that may follow. Compiling and each step are bounded by *fuel*, not by trust: a pathological
schema or expression ends in an error of its own request within a second, and never in a stuck engine.

A matcher belongs to one sequence and moves with its tokens. Preemption does not touch it: tokens are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import llguidance
import numpy as np

from engines.errors import LimitError
from engines.request import OVERRUN, Grammar

#: Fuel is about 50,000 a millisecond for compiling and 14,000 for a step.
_LIMITS = llguidance.LLParserLimits(initial_lexer_fuel=2_000_000, step_lexer_fuel=200_000, step_max_items=50_000,
                                    max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False)
#: JSON as most models write it; free white space would let a model fill its limit with it.
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: Schemas and expressions nested deeper than this are refused before anything recursive sees them.
MAX_DEPTH = 64

_NOTHING = "no text can match it from here on; it may refer to itself, or its demands exclude each other"
#: llguidance's names for why it stopped -> words.
_STOPS = {"NoExtension": _NOTHING, "NoExtensionBias": _NOTHING, "LexerTooComplex": "its expressions are too complex",
          "ParserTooComplex": "its rules are too complex"}


class Vocabulary(Protocol):
    """What is needed of a tokenizer (``calib.text.Tokenizer`` has it)."""

    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    vocab_size: int

    def id_to_bytes(self, index: int) -> bytes: ...

    def encode(self, text: str, *, bos: bool = True) -> list[int]: ...


class GrammarError(LimitError):
    """A grammar that cannot be used, or that went over its bounds."""

    code = "grammar"


class _Adapter:
    """The tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Vocabulary, width: int) -> None:
        known = range(tokenizer.vocab_size)
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(index for index in tokenizer.special_ids if index in known)
        self.tokens = [tokenizer.id_to_bytes(index) if index in known else b"" for index in range(width)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text, bos=False)


class Matcher:
    """The state of one sequence in its grammar."""

    __slots__ = ("_bits", "_inner", "_width")

    def __init__(self, inner: llguidance.LLMatcher, width: int) -> None:
        self._inner, self._width = inner, width
        self._bits = np.zeros(-(-width // 32), np.int32)

    def allowed(self) -> np.ndarray:
        """bool [vocabulary]: the tokens that may follow. GrammarError when a bound was reached."""
        self._inner.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        return np.unpackbits(self._bits.view(np.uint8), bitorder="little")[:self._width].astype(np.bool_)

    def accept(self, token: int) -> None:
        """Move on by a token that was allowed."""
        self._inner.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._inner.is_error():
            said = _first_line(self._inner.get_error())
            raise GrammarError(f"{OVERRUN}{_STOPS.get(said, said)}",
                               "Simplify the schema or expression.")

    @property
    def finished(self) -> bool:
        """Nothing but an end token may follow."""
        return self._inner.is_stopped()


class Grammars:
    """Makes matchers for one tokenizer. ``width`` is the model's vocabulary (rows of its output layer)."""

    def __init__(self, tokenizer: Vocabulary, width: int) -> None:
        self._tokenizer, self._width = tokenizer, width
        self._adapted: llguidance.LLTokenizer | None = None

    def _vocabulary(self) -> llguidance.LLTokenizer:
        """Made once, when a grammar is first asked for: a trie over all tokens."""
        if self._adapted is None:
            if not self._tokenizer.eos_ids:
                raise GrammarError("this model has no end token, which a grammar needs", "Use another model.")
            adapter = llguidance.TokenizerWrapper(_Adapter(self._tokenizer, self._width))
            self._adapted = llguidance.LLTokenizer(adapter, n_vocab=self._width,
                                                   eos_token=list(self._tokenizer.eos_ids))
        return self._adapted

    def warm(self) -> None:
        """Make what all grammars share, if this model can have any."""
        if self._tokenizer.eos_ids:
            self._vocabulary()

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning. GrammarError in words for what cannot be compiled within the bounds."""
        if _depth(grammar.source) > MAX_DEPTH:
            raise GrammarError(f"the {grammar.kind} is nested deeper than {MAX_DEPTH}", "Flatten it.")
        try:
            inner = llguidance.LLMatcher(self._vocabulary(), _compiled(grammar), log_level=0, limits=_LIMITS)
        except ValueError as error:
            raise GrammarError(f"the {grammar.kind} cannot be read: {_first_line(str(error))}",
                               "Correct it.") from error
        if inner.is_error():
            raise GrammarError(f"the {grammar.kind} cannot be used: {_first_line(inner.get_error())}",
                               "Correct or simplify it.")
        return Matcher(inner, self._width)


def _compiled(grammar: Grammar) -> str:
    if grammar.kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(grammar.source, defaults=_JSON_STYLE)
    if grammar.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(grammar.source)
    return llguidance.LLMatcher.grammar_from_lark(grammar.source)


def _depth(source: str) -> int:
    """The deepest nesting of brackets, counted without looking at quotes: an upper bound."""
    deepest = depth = 0
    for char in source:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return deepest


def _first_line(text: str) -> str:
    lines: Sequence[str] = text.strip().splitlines() or ["no reason given"]
    return lines[0][:300]
