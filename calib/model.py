"""From a reference to a model folder, and from a folder to a module.

A reference is a local folder, a GGUF file, or a hub name. A GGUF file is converted once into a sibling folder; a hub
name is downloaded into the hub's own cache unless ``offline``.
"""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from calib.architecture import check_weights
from calib.blocks import all_finite
from calib.checkpoint import QuantizedCheckpoint
from calib.config import read_config
from calib.errors import ENVIRONMENT, CalibError
from calib.formats import gguf
from calib.formats.hf import Shards, read_json, without_progress_bars
from calib.grids import dequantize_weight, fake_quantize
from calib.kv import FAKE_KV
from calib.layers import family_of
from calib.scheme import Grid, Scheme
from calib.text import TOKENIZER_FILES


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


def load_hf(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The unquantized model in eval mode. Every tensor is one of config.json's, and finite: checked before loading."""
    config, shards = read_config(folder), Shards(folder)
    family_of(config, str(folder))
    check_weights(config, shards)
    check_finite(shards)
    with without_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True,
                                                     trust_remote_code=False)
    return model.eval()


def check_finite(shards: Shards) -> None:
    """CalibError that names the first tensor with a NaN or an infinity."""
    for name in shards:
        if shards[name].dtype in ("F32", "F16", "BF16") and not all_finite(shards.load(name)):
            raise CalibError(f"{shards.folder}: tensor {name} holds NaN or infinity",
                             "Copy or download the weights again; if they are the original's, the model is broken.")


def load_model(checkpoint: QuantizedCheckpoint) -> PreTrainedModel:
    """The checkpoint as a plain Hugging Face module in float32: weights dequantized, activations and KV fake-quantized.

    It shares no code with modelopt and none with the engines, and so can judge both.
    """
    config = AutoConfig.for_model(**checkpoint.config)
    plain = "eager" if family_of(checkpoint.config, "the checkpoint").softcap else "sdpa"
    config._attn_implementation = FAKE_KV if checkpoint.kv.quantized else plain
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    held: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in checkpoint.tensors():
        module, _, leaf = name.rpartition(".")
        held.setdefault(module, {})[leaf] = tensor
    unset = set(dict(model.named_parameters()))
    with torch.no_grad():
        for module, tensors in held.items():
            unset -= place_module(model, module, tensors, checkpoint.schemes.get(module), checkpoint.kv)
    if unset:
        raise CalibError(f"{checkpoint.path} has no tensor {min(unset)}", "The checkpoint is incomplete.")
    return model.eval()


def place_module(model: torch.nn.Module, module: str, tensors: dict[str, torch.Tensor], scheme: Scheme | None, kv: Grid
                 ) -> set[str]:
    """Put one module's canonical tensors in place, its weight dequantized and its input fake-quantized by ``scheme``.

    An attention module takes its ``k_scale`` and ``v_scale``. Returns the names of the parameters that were set.
    """
    target: Any = model.get_submodule(module)
    if "k_scale" in tensors:
        target.kv_grid, target.k_scale, target.v_scale = kv, tensors["k_scale"], tensors["v_scale"]
        return set()
    values = dict(tensors)
    if scheme is not None:
        values = {leaf: tensor for leaf, tensor in tensors.items() if leaf == "bias"}
        values["weight"] = dequantize_weight(scheme.weight, tensors["weight"], tensors["weight_scale"],
                                             tensors.get("weight_zero"), tensors.get("g_idx"))
        pre, scale, grid = tensors.get("pre_quant_scale"), tensors.get("input_scale"), scheme.activation

        def prepare(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            x = args[0] if pre is None else args[0] * pre
            return (x if grid is None else fake_quantize(grid, x, scale), *args[1:])

        if pre is not None or grid is not None:
            target.register_forward_pre_hook(prepare)
    for leaf, value in values.items():
        getattr(target, leaf).copy_(value)
    return {f"{module}.{leaf}" for leaf in values}
