"""The files that a tokenizer consists of: found in a model's folder, converted from older layouts, read."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calib.errors import CalibError
from calib.json_text import parse_object

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                   "chat_template.jinja", "chat_template.json")
GENERATION = "generation_config.json"
COPY = "Copy the model folder again."


def read_json(files: Mapping[str, bytes], name: str, origin: str) -> dict[str, Any]:
    """One of them as an object, empty where it is missing; CalibError where it is damaged."""
    return parse_object(files[name], f"{origin}: {name}", CalibError, COPY) if name in files else {}


def token_text(names: Mapping[str, Any], key: str) -> str | None:
    """A special token is written as a string or as {"content": ...}; None where the model has none."""
    token = names.get(key)
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str | None):
        raise CalibError(f"tokenizer_config.json: {key} is {token!r}, not a text", COPY)
    return token or None


def collect(folder: Path) -> dict[str, bytes]:
    """A folder's tokenizer files by name; CalibError where there is none."""
    files = {name: (folder / name).read_bytes() for name in (*TOKENIZER_FILES, GENERATION)
             if (folder / name).is_file()}
    if "tokenizer.json" in files:
        return files
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "tokenizer_config.json")):
        raise CalibError(f"{folder} has no tokenizer", "A model folder holds tokenizer.json beside config.json.")
    return _converted(folder) | {name: data for name, data in files.items() if name == GENERATION}


def _converted(folder: Path) -> dict[str, bytes]:
    """Let transformers turn an older tokenizer layout into tokenizer.json."""
    from transformers import AutoTokenizer
    with tempfile.TemporaryDirectory() as place:
        try:
            AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(place)
        except Exception as error:  # whatever a foreign tokenizer raises, the mend is the same
            raise CalibError(f"the tokenizer in {folder} cannot be read: {str(error).splitlines()[0]}",
                             "Save it once with transformers so that the folder has a tokenizer.json.") from error
        files = {name: (Path(place) / name).read_bytes() for name in TOKENIZER_FILES
                 if (Path(place) / name).is_file()}
    if "tokenizer.json" not in files:
        raise CalibError(f"the tokenizer in {folder} has no fast form", "Only tokenizers with a tokenizer.json work.")
    return files
