"""CalibrationSet: texts become seeded, packed rows of token ids, with a digest, licences and fingerprints.

*Packed*: documents are shuffled by the seed, encoded (BOS by the one rule of ``text``), joined with an end token behind
each, and cut into rows of equal length. No padding means no padding statistics: a padded row would teach the scales
what the pad token looks like.

*Fingerprints*: the hash of every document that was used, and of each run of 13 words in it. They let anybody check,
without the texts, that calibration and evaluation do not share material (``refuse_overlap``).
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from calib.artifact import Artifact, sha256_hex
from calib.artifact_writer import ArtifactWriter
from calib.errors import CalibError
from calib.json_text import parse_object
from calib.text import Tokenizer

KIND = "calibration-set"
FORMAT = 1
NGRAM = 13
BATCH_ROWS = 8
_TOKENS, _FINGERPRINTS = "tokens.safetensors", "fingerprints.safetensors"
_WORD = re.compile(r"\w+")


class CalibrationTextError(CalibError):
    """Calibration texts that are missing, empty, malformed, too short, or shared with the evaluation."""

    code = "calibration_text"


def document_hash(text: str) -> int:
    """Signed 64-bit hash of a document's words, blind to case, punctuation and spacing."""
    return _hash64(" ".join(_WORD.findall(text.lower())))


def ngram_hashes(text: str) -> set[int]:
    """Signed 64-bit hashes of every run of 13 words; a shorter text has none."""
    words = _WORD.findall(text.lower())
    return {_hash64(" ".join(words[start:start + NGRAM])) for start in range(len(words) - NGRAM + 1)}


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Hashes of documents and of 13-word runs."""

    documents: frozenset[int]
    ngrams: frozenset[int]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Fingerprints:
        documents: set[int] = set()
        ngrams: set[int] = set()
        for text in texts:
            documents.add(document_hash(text))
            ngrams |= ngram_hashes(text)
        return cls(frozenset(documents), frozenset(ngrams))


def overlap(one: CalibrationSet | Iterable[str], other: CalibrationSet | Iterable[str]) -> tuple[int, int]:
    """How many documents and how many 13-word runs two collections share."""
    first, second = (side.fingerprints() if isinstance(side, CalibrationSet) else Fingerprints.of(side)
                     for side in (one, other))
    return len(first.documents & second.documents), len(first.ngrams & second.ngrams)


def refuse_overlap(one: CalibrationSet | Iterable[str], other: CalibrationSet | Iterable[str], what: str) -> None:
    """CalibrationTextError when the two share a document or a 13-word run; ``what`` names them."""
    documents, ngrams = overlap(one, other)
    if documents or ngrams:
        raise CalibrationTextError(f"{what} share {documents} documents and {ngrams} runs of {NGRAM} words",
                                   "Figures on texts that were calibrated on flatter; take disjoint documents.")


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """An opened set: int32 token ids [rows, length], and where they came from."""

    artifact: Artifact
    tokens: torch.Tensor

    @classmethod
    def open(cls, path: Path | str) -> CalibrationSet:
        artifact = Artifact.open(path, KIND, FORMAT)
        artifact.check([_TOKENS, _FINGERPRINTS])
        return cls(artifact, load_file(artifact.file(_TOKENS))["tokens"])

    @classmethod
    def build(cls, sources: Sequence[Path], tokenizer: Tokenizer, out: Path, *, rows: int = 16, length: int = 256,
              seed: int = 0, chat: bool = False, licences: Mapping[str, str] | None = None) -> CalibrationSet:
        """Pack ``rows`` x ``length`` tokens from JSONL files into an artifact at ``out``.

        A line is {"text": ...} or {"messages": [...]} (other keys are ignored). With ``chat`` the model's template is
        applied (a text becomes one user message); without it, messages are refused. A file's licence is taken from
        ``licences`` by file name, else from a manifest.json beside it. CalibrationTextError for an empty or malformed
        file, or when the texts give too few tokens.
        """
        if rows < 1 or length < 1:
            raise CalibrationTextError(f"{rows} rows of {length} tokens are no calibration set",
                                       "Ask for at least one.")
        documents: list[Any] = []
        origins = []
        for source in sources:
            lines = _read_lines(Path(source))
            documents += lines
            origins.append({"name": Path(source).name, "documents": len(lines),
                            "sha256": sha256_hex(Path(source).read_bytes()),
                            "licence": (licences or {}).get(Path(source).name) or _licence_beside(Path(source))})
        random.Random(seed).shuffle(documents)
        ids, used = _pack(documents, tokenizer, rows * length, chat)
        with ArtifactWriter(out, KIND, FORMAT) as writer:
            tokens = torch.tensor(ids, dtype=torch.int32).reshape(rows, length)
            save_file({"tokens": tokens}, writer.folder / _TOKENS)
            prints = Fingerprints.of(used)
            save_file({"documents": torch.tensor(sorted(prints.documents), dtype=torch.int64),
                       "ngrams": torch.tensor(sorted(prints.ngrams), dtype=torch.int64)},
                      writer.folder / _FINGERPRINTS)
            writer.record = {
                "rows": rows, "length": length, "seed": seed, "chat": chat, "sources": origins,
                "documents_used": len(used), "tokenizer": tokenizer.digest, "adds_bos": tokenizer.adds_bos,
                "template_sha256": tokenizer.template_sha256 if chat else None,
                "sample": tokenizer.decode(ids[:length], skip_special=False)}
        return cls.open(out)

    @property
    def digest(self) -> str:
        return self.artifact.digest

    @property
    def licences(self) -> dict[str, str]:
        """File name -> licence ("unknown" where nobody said)."""
        return {source["name"]: source["licence"] for source in self.artifact.record["sources"]}

    @property
    def sample(self) -> str:
        """The first packed row as text, special tokens visible: what the model was shown."""
        return str(self.artifact.record["sample"])

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    def batches(self, rows: int | None = None, seed: int = 0) -> list[torch.Tensor]:
        """int64 token ids [b, length] with b <= 8; of all rows, or of ``rows`` of them drawn by ``seed``."""
        chosen = range(self.rows)
        if rows is not None and rows < self.rows:
            chosen = sorted(random.Random(seed).sample(chosen, rows))  # type: ignore[assignment]
        return list(self.tokens[list(chosen)].long().split(BATCH_ROWS))

    def fingerprints(self) -> Fingerprints:
        held = load_file(self.artifact.file(_FINGERPRINTS))
        return Fingerprints(frozenset(held["documents"].tolist()), frozenset(held["ngrams"].tolist()))

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """CalibrationTextError when the set was made with another tokenizer."""
        if self.artifact.record["tokenizer"] != tokenizer.digest:
            raise CalibrationTextError("the calibration set was made with another model's tokenizer",
                                       "Build it again for this model.")


def check_row_length(length: int, positions: int | None) -> None:
    """CalibrationTextError when rows are longer than the model has positions: it was never taught what it sees."""
    if positions is not None and length > positions:
        raise CalibrationTextError(f"calibration rows have {length:,} tokens, the model knows {positions:,} positions",
                                   f"Make rows of at most {positions:,} tokens (--length).")


def pack_texts(texts: Iterable[str], tokenizer: Tokenizer, length: int, rows: int) -> torch.Tensor:
    """int64 [n, length] with 1 <= n <= rows: texts in order, packed like a calibration set, the rest dropped.

    CalibrationTextError when they do not fill one row.
    """
    ids: list[int] = []
    for text in texts:
        ids += _document_ids({"text": text}, tokenizer, chat=False)[0]
        if len(ids) >= rows * length:
            break
    count = min(rows, len(ids) // length)
    if count == 0:
        raise CalibrationTextError(f"the texts have {len(ids)} tokens, one row needs {length}",
                                   "Give more or longer texts.")
    return torch.tensor(ids[:count * length]).view(count, length)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")  # JSON's own line break: str.splitlines cuts at U+2028 inside a text
    except OSError as error:
        raise CalibrationTextError(f"calibration file {path} cannot be read: {error.strerror or error}",
                                   "Give a JSONL file with one {\"text\": ...} in each line.") from error
    documents = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        value = parse_object(line, f"{path}:{number}", CalibrationTextError, "Repair or remove the line.")
        if ("text" in value) == ("messages" in value):
            raise CalibrationTextError(f"{path}:{number} has neither a text nor messages (or both)",
                                       "A line is {\"text\": ...} or {\"messages\": [...]}.")
        documents.append(value)
    if not documents:
        raise CalibrationTextError(f"calibration file {path} is empty", "Give a file with at least one line of text.")
    return documents


def _licence_beside(path: Path) -> str:
    manifest = path.parent / "manifest.json"
    if not manifest.is_file():
        return "unknown"
    try:
        files = parse_object(manifest.read_bytes(), str(manifest), CalibrationTextError)["files"]
        return str(files[path.name]["licence"])
    except (OSError, CalibrationTextError, KeyError, TypeError):
        return "unknown"


def _document_ids(document: Mapping[str, Any], tokenizer: Tokenizer, *, chat: bool) -> tuple[list[int], str]:
    """Ids of one document with an end token behind it, and its plain text."""
    if "messages" in document:
        messages = document["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(part, dict) for part in messages):
            raise CalibrationTextError(f"a calibration document has messages {str(messages)[:60]!r}",
                                       "Messages are a list of {\"role\": ..., \"content\": ...}.")
        if not chat:
            raise CalibrationTextError("the calibration texts hold messages, but the chat template is not applied",
                                       "Ask for the chat template, or give plain texts.")
        return tokenizer.chat(messages, add_generation_prompt=False), "\n".join(
            str(message.get("content")) for message in messages)
    text = document["text"]
    if not isinstance(text, str):
        raise CalibrationTextError(f"a calibration text is a {type(text).__name__}", "A text is a string.")
    if chat:
        return tokenizer.chat([{"role": "user", "content": text}], add_generation_prompt=False), text
    return tokenizer.encode(text) + list(tokenizer.eos_ids[:1]), text


def _pack(documents: Iterable[Mapping[str, Any]], tokenizer: Tokenizer, needed: int, chat: bool
          ) -> tuple[list[int], list[str]]:
    ids: list[int] = []
    used: list[str] = []
    for piece, text in _documents(documents, tokenizer, chat):
        ids += piece
        used.append(text)
        if len(ids) >= needed:
            return ids[:needed], used
    raise CalibrationTextError(f"the calibration texts have {len(ids)} tokens, {needed} are needed",
                               "Give more text, or ask for fewer or shorter rows.")


def _documents(documents: Iterable[Mapping[str, Any]], tokenizer: Tokenizer, chat: bool
               ) -> Iterator[tuple[list[int], str]]:
    for document in documents:
        yield _document_ids(document, tokenizer, chat=chat)
