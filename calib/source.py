"""From a reference to a model folder, without loading what would run it.

A reference is a local folder, a GGUF file, or a hub name. A GGUF file is converted once into a sibling folder; a hub
name is downloaded into the hub's own cache unless ``offline``.
"""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

from calib.errors import ENVIRONMENT, CalibError
from calib.formats import gguf
from calib.formats.hf import read_json
from calib.tokenizer_files import TOKENIZER_FILES


class ModelNotFoundError(CalibError):
    """There is no such folder, file or hub model."""

    code = "model_not_found"
    exit_code = ENVIRONMENT


def resolve_model(ref: str | Path, *, offline: bool = False) -> Path:
    """The model's folder. ModelNotFoundError, or a CalibError that says what is wrong with the file."""
    path = Path(ref)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CalibError(f"{path} has no config.json", "Give the folder that holds config.json and the weights.")
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFoundError(f"there is no file {path}", "Check the path.")
        return gguf_to_folder(path, path.with_name(f"{path.stem}-bf16"))
    return _from_hub(str(ref), offline)


def _from_hub(name: str, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import validate_repo_id
    try:
        validate_repo_id(name)
    except ValueError as error:
        raise ModelNotFoundError(f"there is no folder {name}", "Give a model folder, a .gguf file or a hub name."
                                 ) from error
    try:
        return Path(snapshot_download(name, local_files_only=offline, allow_patterns=[
            "*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]))
    except Exception as error:  # the hub client has many error classes; the user needs the one line
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = "in the local hub cache (offline)" if offline else "on the hub"
        raise ModelNotFoundError(f"model {name} was not found {where}: {reason}",
                                 "Check the name and the network, or give a local folder.") from error


def gguf_to_folder(source: Path, out: Path) -> Path:
    """Convert a GGUF file into the bf16 folder ``out`` (whole or not at all). A conversion of the file as it is now, by
    size and time of change, is kept; one of another content is made again."""
    source, out = Path(source), Path(out)
    partial, note = out.with_name(f".{out.name}.partial"), out.with_name(f".{out.name}.source")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_name(f".{out.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = _stamp(source)
        if (out / "config.json").is_file():
            if note.is_file() and note.read_text() == stamp:
                return out
            if not (out / gguf.SOURCE_FILE).is_file():
                raise CalibError(f"{out} is there and was not converted from {source.name}", "Move it away.")
            shutil.rmtree(out)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            gguf.write_folder(source, partial)
            partial.rename(out)
            note.write_text(stamp)
        except OSError as error:
            raise CalibError(f"cannot write {out}: {error.strerror or error}", "Free disk space or check the folder."
                             ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return out


def _stamp(source: Path) -> str:
    """Sizes and times of what a conversion reads: the file, and a tokenizer beside it."""
    facts = [path.stat() for path in (source, *(source.with_name(name) for name in TOKENIZER_FILES)) if path.is_file()]
    return " ".join(f"{its.st_size}@{its.st_mtime_ns}" for its in facts)


def source_grid_of(folder: Path) -> str | None:
    """What the folder's weights were dequantized from ("Q4_1 g32"), or None."""
    path = folder / gguf.SOURCE_FILE
    return read_json(path).get("source_grid") if path.is_file() else None
