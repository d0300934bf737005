"""GGUF files as a source: dequantized once into a bf16 Hugging Face folder.

A GGUF file carries everything: hyper-parameters (``llama.*`` keys), tensors in block formats (Q4_1: 32 weights share an
fp16 scale and minimum), and the tokenizer as lists of tokens, types and merges. Two conventions must be undone:
llama.cpp stores q and k rows interleaved for its rotary kernel ([heads, half, 2] instead of [heads, 2, half]), and the
tokenizer's pre-splitting regex is only named (``tokenizer.ggml.pre``).

The grid that the weights came from is written beside the model, because a quantizer with that very grid would reproduce
the model for nothing and its figures would flatter it.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from calib.errors import CalibError
from calib.formats.hf import MissingWeightsError, write_shards

SOURCE_FILE = "toolkit_source.json"
_CONTROL, _USER_DEFINED = 3, 4
_HEAD = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
         "output.weight": "lm_head.weight"}
_LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
          "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
          "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_GROUP = {"Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q5_1": 32, "Q8_0": 32, "Q2_K": 16, "Q3_K": 16, "Q4_K": 32, "Q5_K": 32,
          "Q6_K": 16}
_LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                 r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def _byte_level(split: Any | None) -> Any:
    """A byte-level pre-tokenizer behind ``split``; without one, GPT-2's own expression."""
    if split is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return split


_PRE = {
    "gpt-2": lambda: _byte_level(None),
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(None)]),
    "llama-bpe": lambda: pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
}


class _Reader:
    """Key-value fields and tensors of one GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = gguf.GGUFReader(path)
        except (ValueError, OSError, struct.error, IndexError, KeyError) as error:
            raise MissingWeightsError(f"{path} is no whole GGUF file: {error}", "Copy or download it again."
                                      ) from error
        self.tensors = {tensor.name: tensor for tensor in self._file.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        field = self._file.fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CalibError(f"{self.path} lacks the field {key}", "Convert the model to GGUF with a newer llama.cpp.")
        return value


def _config(reader: _Reader) -> dict[str, Any]:
    architecture = reader.need("general.architecture")
    if architecture != "llama":
        raise CalibError(f"{reader.path} is a {architecture} model, which is not supported from GGUF",
                         "Supported GGUF architectures: llama. Use the Hugging Face folder of other models.")
    refused = next((key for key in ("llama.expert_count", "llama.rope.scaling.type") if reader.get(key)), None)
    if refused or "rope_freqs.weight" in reader.tensors:
        raise CalibError(f"{reader.path} has {refused or 'rope_freqs.weight'}, which is not supported from GGUF",
                         "Use the Hugging Face folder of this model.")
    heads, hidden = reader.need("llama.attention.head_count"), reader.need("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": reader.need("llama.feed_forward_length"),
        "num_hidden_layers": reader.need("llama.block_count"), "num_attention_heads": heads,
        "num_key_value_heads": reader.get("llama.attention.head_count_kv", heads),
        "head_dim": reader.get("llama.attention.key_length", hidden // heads),
        "max_position_embeddings": reader.need("llama.context_length"),
        "rms_norm_eps": float(f"{reader.need('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(reader.get("llama.rope.freq_base", 10000.0))},
        "vocab_size": int(reader.tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in reader.tensors, "attention_bias": False, "mlp_bias": False,
        "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
        "bos_token_id": reader.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": reader.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": reader.get("tokenizer.ggml.padding_token_id"),
    }


def _hf_name(name: str) -> str:
    if name in _HEAD:
        return _HEAD[name]
    block, _, rest = name.partition("blk.")[2].partition(".")
    stem, _, suffix = rest.partition(".")
    if not block.isdecimal() or stem not in _LAYER or suffix != "weight":
        raise CalibError(f"the GGUF file has a tensor {name}, which no Llama has",
                         "Use the Hugging Face folder instead.")
    return f"model.layers.{block}.{_LAYER[stem]}.weight"


def _rotary_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """[heads * (half, 2), in] as llama.cpp stores it -> [heads * (2, half), in] as Hugging Face does."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _weights(reader: _Reader, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in reader.tensors.items():
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if not np.isfinite(values).all():
            raise CalibError(f"{reader.path}: tensor {name} holds NaN or infinity", "Copy or download the file again.")
        if name.endswith("attn_q.weight"):
            values = _rotary_rows(values, config["num_attention_heads"])
        elif name.endswith("attn_k.weight"):
            values = _rotary_rows(values, config["num_key_value_heads"])
        yield _hf_name(name), torch.from_numpy(values).to(torch.bfloat16)


def source_grid(reader: _Reader) -> str | None:
    """The most frequent quantized block format of the matrices, e.g. "Q4_1 g32"; None when they are float."""
    kinds = Counter(tensor.tensor_type.name for name, tensor in reader.tensors.items() if name.startswith("blk."))
    quantized = [(count, kind) for kind, count in kinds.items() if kind not in ("F32", "F16", "BF16", "F64")]
    if not quantized:
        return None
    kind = max(quantized)[1]
    return f"{kind} g{_GROUP[kind]}" if kind in _GROUP else kind


def _tokenizer(reader: _Reader) -> Tokenizer:
    kind, pre = reader.need("tokenizer.ggml.model"), reader.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _PRE:
        raise CalibError(f"{reader.path}: a tokenizer of kind {kind!r} with splitting {pre!r} is not supported",
                         f"Put the model's tokenizer.json beside the GGUF file. Known: gpt2 with {', '.join(_PRE)}.")
    tokens, types = reader.need("tokenizer.ggml.tokens"), reader.need("tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ", 1)) for pair in reader.need("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _PRE[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token, sort in zip(tokens, types, strict=True) if sort == _CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)
                          for token, sort in zip(tokens, types, strict=True) if sort == _USER_DEFINED])
    bos = reader.get("tokenizer.ggml.bos_token_id")
    if reader.get("tokenizer.ggml.add_bos_token", False) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)])
    return tokenizer


def _tokenizer_config(reader: _Reader) -> dict[str, Any]:
    tokens = reader.need("tokenizer.ggml.tokens")
    names = {name: reader.get(f"tokenizer.ggml.{key}_token_id")
             for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"),
                               ("unk_token", "unknown"))}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
            "add_bos_token": bool(reader.get("tokenizer.ggml.add_bos_token", False)),
            "model_max_length": reader.need("llama.context_length"),
            **{name: tokens[index] for name, index in names.items() if index is not None}}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _write_tokenizer(reader: _Reader, folder: Path) -> None:
    beside = reader.path.parent / "tokenizer.json"
    if beside.is_file():
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
            if (reader.path.parent / name).is_file():
                (folder / name).write_bytes((reader.path.parent / name).read_bytes())
        return
    _tokenizer(reader).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(reader))
    if template := reader.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def write_folder(path: Path, folder: Path) -> None:
    """Fill an existing empty ``folder`` with the model of a GGUF file, as bf16 Hugging Face files."""
    reader = _Reader(path)
    config = _config(reader)
    _write_tokenizer(reader, folder)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None})
    _write_json(folder / SOURCE_FILE, {
        "source": path.name, "source_grid": source_grid(reader), "name": reader.get("general.name"),
        "licence": reader.get("general.license")})
    write_shards(folder, _weights(reader, config))
