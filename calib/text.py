"""Text to token ids and back: the tokenizer, the one BOS rule, the chat template.

**BOS.** Whether a beginning-of-sequence token stands in front decides accuracy more than most quantization does (a
missing or doubled BOS has cost 60 points on arc_easy). There is one rule and it lives here: ``encode`` puts a BOS in
front iff ``bos=True`` *and* the model's own tokenizer adds one; a chat template owns its BOS, so ``chat`` adds none.
No end token is ever added.

**User text is text.** ``encode`` never turns the characters ``<|im_end|>`` into the control token. ``chat`` renders the
model's template with every special string inside message contents masked, so that only the template can emit control
tokens; contents are unmasked afterwards and encoded as ordinary characters.

**The template is somebody else's program.** It runs in Jinja's immutable sandbox with bounded output, bounded
repetition operators and a deadline. The clock is not offered to it (``strftime_now`` is undefined), because the same
messages must give the same ids tomorrow.

Only the ``tokenizers`` library is needed for a folder with a ``tokenizer.json``; older layouts are converted through
transformers. torch is never imported.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tokenizers

from calib.artifact import canonical_json
from calib.chat_template import ChatTemplate
from calib.errors import CalibError
from calib.tokenizer_files import COPY, GENERATION, collect, read_json, token_text

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Characters, or ids, from which on a text is a batch of one: for a batch the library lets the interpreter's lock go.
_LONG = 2000


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character; this is the way back.

    Printable Latin-1 bytes stand for themselves, the other 68 are numbered upwards from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    for offset, byte in enumerate(sorted(set(range(256)) - set(printable))):
        table[chr(0x100 + offset)] = byte
    return table


class Tokenizer:
    """A model's tokenizer. Immutable once opened and safe to share between threads."""

    def __init__(self, files: Mapping[str, bytes], origin: str) -> None:
        self._files = dict(files)
        self._origin = origin
        config = read_json(files, "tokenizer_config.json", origin)
        names = read_json(files, "special_tokens_map.json", origin) | config
        try:
            self._marked = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
            self._plain = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:
            raise CalibError(f"{origin}: tokenizer.json cannot be read: {error}",
                             COPY) from error
        for backend in (self._marked, self._plain):
            backend.no_truncation()
            backend.no_padding()
        self._plain.encode_special_tokens = True
        self._byte_level = '"ByteLevel"' in json.dumps(read_json(files, "tokenizer.json", origin).get("decoder"))
        added = self._marked.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self._bytes: dict[int, bytes] = {}
        self.special_ids: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        self._bos, self._eos = token_text(names, "bos_token"), token_text(names, "eos_token")
        self.bos_id: int | None = self._marked.token_to_id(self._bos) if self._bos else None
        self.eos_ids: tuple[int, ...] = self._find_eos_ids()
        self.adds_bos: bool = self._find_adds_bos(config.get("add_bos_token"))
        #: One more than the highest id. The model's embedding may be padded beyond it.
        self.vocab_size: int = max(self._marked.get_vocab(with_added_tokens=True).values()) + 1
        template = self._find_template(config)
        self._template = None if template is None else ChatTemplate(template, origin)
        self.template_sha256: str | None = (None if template is None
                                            else hashlib.sha256(template.encode()).hexdigest())
        #: sha256 over everything that decides ids: tokenizer, its configuration, the template, the end tokens.
        self.digest: str = hashlib.sha256(canonical_json(
            {"eos_ids": list(self.eos_ids), "files": {name: hashlib.sha256(data).hexdigest()
                                                      for name, data in files.items() if name != GENERATION}}
        )).hexdigest()

    @classmethod
    def open(cls, folder: Path | str) -> Tokenizer:
        """Open the tokenizer of a model, checkpoint or engine folder. CalibError: there is none, or it is damaged."""
        folder = Path(folder)
        return cls(collect(folder), str(folder))

    def save(self, folder: Path | str) -> None:
        """Write the tokenizer's files (and generation_config.json, which holds end tokens) into ``folder``."""
        for name, data in self._files.items():
            (Path(folder) / name).write_bytes(data)

    def _find_eos_ids(self) -> tuple[int, ...]:
        declared = read_json(self._files, GENERATION, self._origin).get("eos_token_id")
        found = declared if isinstance(declared, list) else [] if declared is None else [declared]
        if odd := [index for index in found if type(index) is not int or index < 0]:
            raise CalibError(f"{GENERATION}: eos_token_id is {odd[0]!r}, which is no token", COPY)
        if self._eos:
            index = self._marked.token_to_id(self._eos)
            if index is None:
                raise CalibError(f"{self._origin}: the end token {self._eos!r} is not in the vocabulary", COPY)
            found = [*found, index]
        return tuple(sorted(set(found)))

    def _find_adds_bos(self, declared: Any) -> bool:
        if not isinstance(declared, bool | None):
            raise CalibError(f"tokenizer_config.json: add_bos_token is {declared!r}, not true or false", COPY)
        if self.bos_id is None:
            if declared:
                raise CalibError(f"{self._origin}: a begin token is to be added, and {self._bos!r} is not in the "
                                 "vocabulary", COPY)
            return False
        return self._marked.encode("a").ids[:1] == [self.bos_id] if declared is None else declared

    def _find_template(self, config: Mapping[str, Any]) -> str | None:
        if "chat_template.jinja" in self._files:
            try:
                return self._files["chat_template.jinja"].decode()
            except UnicodeDecodeError as error:
                raise CalibError(f"{self._origin}: chat_template.jinja is not UTF-8", COPY) from error
        template = (read_json(self._files, "chat_template.json", self._origin) | dict(config)).get("chat_template")
        if isinstance(template, list):  # several named templates: the one for plain chat
            named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = named[0].get("template") if named else None
        if not isinstance(template, str | None):
            raise CalibError(f"{self._origin}: the chat template is a {type(template).__name__}, not a text", COPY)
        return template

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Token ids of plain text; special strings stay text. A BOS in front iff asked for and the model adds one."""
        ids = _ids(self._plain, text)
        return [cast(int, self.bos_id), *ids] if bos and self.adds_bos else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids. An incomplete UTF-8 sequence gives U+FFFD. CalibError for an id outside the vocabulary."""
        if len(ids) and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            index = next(index for index in ids if not 0 <= index < self.vocab_size)
            raise CalibError(f"token id {index} is outside the vocabulary of {self.vocab_size}",
                             "The ids come from another model's tokenizer.")
        if len(ids) < _LONG:
            return self._marked.decode(list(ids), skip_special_tokens=skip_special)
        return self._marked.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]

    def id_to_bytes(self, index: int) -> bytes:
        """The raw bytes that a token stands for (a token may be a piece of a character). b"" for an unused id.

        A SentencePiece tokenizer's leading space is kept; ``decode`` drops it at the start of a text.
        """
        if (known := self._bytes.get(index)) is None:
            known = self._bytes[index] = self._bytes_of(index)
        return known

    def _bytes_of(self, index: int) -> bytes:
        if index in self._added:
            return self._added[index].encode()
        token = self._marked.id_to_token(index)
        if token is None:
            return b""
        if self._byte_level:
            table = _byte_of_char()
            return bytes(table[char] for char in token) if all(char in table for char in token) else token.encode()
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode()

    def least_tokens(self, text: str) -> int:
        """How many tokens a text has at least, without encoding it; 0 where nothing is certain."""
        if self._longest_token is None:
            return 0
        spelled = text.encode("utf-8", "surrogatepass").translate(None, self._unspelled)
        return -(-len(spelled) // self._longest_token)

    @functools.cached_property
    def _longest_token(self) -> int | None:
        """Bytes of plain text that one token stands for at most; None where that cannot be said for certain.

        It can for byte-level BPE without a normalizer: no byte that has a token is left out or changed. (A normalizer,
        an added token that strips, or another model's unknown token may stand for any length.)
        """
        data = read_json(self._files, "tokenizer.json", self._origin)
        model, split = data.get("model") or {}, data.get("pre_tokenizer") or {}
        steps = split.get("pretokenizers", [split])
        certain = (
            data.get("normalizer") is None and model.get("type") == "BPE"
            and not model.get("continuing_subword_prefix") and not model.get("end_of_word_suffix")
            and "ByteLevel" in [step.get("type") for step in steps]
            and all(step.get("type") in ("ByteLevel", "Digits")
                    or (step.get("type") == "Split" and step.get("behavior") != "Removed") for step in steps)
            and not any(added.get("lstrip") or added.get("rstrip") for added in data.get("added_tokens") or []))
        return max(1, *(len(self._bytes_of(index)) for index in range(self.vocab_size))) if certain else None

    @functools.cached_property
    def _unspelled(self) -> bytes:
        """Bytes without a token of their own, which byte-level BPE may leave out."""
        return bytes(byte for char, byte in _byte_of_char().items() if self._marked.token_to_id(char) is None)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @property
    def template_source(self) -> str:
        """The chat template's own text; CalibError when the model has none."""
        return self._chat_template().source

    @property
    def takes_tools(self) -> bool:
        """Whether the model's template looks at tools."""
        return self._template is not None and self._template.takes_tools

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
               tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The chat template's text, for showing to a person. ``chat`` gives the ids."""
        return self._chat_template().render(messages, self._template_names(), add_generation_prompt, tools)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
             tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Token ids of a conversation [{"role", "content"}, ...] under the model's template, which owns the BOS.

        ``tools`` are JSON descriptions of functions, where the template takes them. CalibError when the model has no
        template, refuses the messages, or exceeds the sandbox's bounds.
        """
        template = self._chat_template()
        specials = [self._added[index] for index in sorted(self.special_ids)]
        masked, masked_tools, originals = template.mask(messages, specials, tools)
        rendered = template.render(masked, self._template_names(), add_generation_prompt, masked_tools)
        if not originals:
            return _ids(self._marked, rendered)
        ids: list[int] = []
        for piece in re.split("(" + "|".join(re.escape(s) for s in sorted(specials, key=len, reverse=True)) + ")",
                              rendered):
            if piece in specials:
                ids.append(cast(int, self._marked.token_to_id(piece)))
            elif piece:
                for mark, original in originals.items():
                    piece = piece.replace(mark, original)
                ids += _ids(self._plain, piece)
        return ids

    def _template_names(self) -> dict[str, Any]:
        return {"bos_token": self._bos or "", "eos_token": self._eos or ""}

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise CalibError(f"{self._origin} has no chat template", "Use plain text, or an instruction-tuned model.")
        return self._template


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """A text's ids. Some megabytes take seconds, and nothing else in the process would go on; for a short text a batch
    takes longer."""
    if len(text) < _LONG:
        return backend.encode(text, add_special_tokens=False).ids
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """CalibError unless the tokenizer can belong to a model whose embedding has ``vocab_size`` rows.

    Embeddings are often padded, so some unused rows are normal; ids beyond the last row, or a tenth of the rows
    without a token, mean another model's tokenizer.
    """
    if stray := [index for index in tokenizer.eos_ids if index >= vocab_size]:
        raise CalibError(f"the end token {stray[0]} is beyond the model's {vocab_size} tokens",
                         "This is another model's tokenizer; put the model's own files beside config.json.")
    if tokenizer.vocab_size > vocab_size or tokenizer.vocab_size < 0.9 * vocab_size:
        raise CalibError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model's embedding {vocab_size} rows",
                         "This is another model's tokenizer; put the model's own files beside config.json.")
