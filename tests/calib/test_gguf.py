"""A GGUF file written here from a tiny Llama comes back as the same model; what is not understood is refused."""

import json

import gguf
import numpy as np
import pytest
import torch
from tiny_llamas import tiny_llama
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from calib.errors import CalibError
from calib.formats.hf import MissingWeightsError
from calib.model import load_hf
from calib.source import resolve_model, source_grid_of
from calib.text import Tokenizer

BLOCKS = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
          "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
          "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
TEXT = ["Version 12 of 3,456 lines isn't done", "the quick brown fox's 789 jumps", "Ünïcode 漢字 too"] * 3


def backend():
    """A small real BPE with SmolLM's splitting: single digits, then GPT-2's expression."""
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|s|>", "<|e|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def interleaved(weight, heads):
    """Hugging Face's rotary row order -> llama.cpp's."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, folder, tokenizer, *, kind=gguf.GGMLQuantizationType.F32, architecture="llama", pre="smollm",
               spoil=None, fields=()):
    config, model = json.loads((folder / "config.json").read_text()), load_hf(folder)
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (("embedding_length", "hidden_size"), ("feed_forward_length", "intermediate_size"),
                        ("block_count", "num_hidden_layers"), ("context_length", "max_position_embeddings"),
                        ("attention.head_count", "num_attention_heads"),
                        ("attention.head_count_kv", "num_key_value_heads")):
        writer.add_uint32(f"llama.{name}", config[value])
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    for name in fields:
        writer.add_uint32(name, 2)
    ids = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in ids])
    writer.add_token_types([3 if token in ("<|s|>", "<|e|>") else 1 for token, _ in ids])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0].content }}<|e|>")
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        target = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
                  "lm_head.weight": "output.weight"}.get(name)
        if target is None:
            layer, _, module = name.removesuffix(".weight").removeprefix("model.layers.").partition(".")
            target = f"blk.{layer}.{BLOCKS[module]}.weight"
            if module in ("self_attn.q_proj", "self_attn.k_proj"):
                values = interleaved(values, config["num_attention_heads" if "q_" in module else "num_key_value_heads"])
        if target == spoil:
            values = np.full_like(values, np.nan)
        if values.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(target, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tokenizer():
    return backend()


@pytest.fixture(scope="module")
def source(tmp_path_factory, tokenizer):
    return tiny_llama(tmp_path_factory.mktemp("source") / "m", vocab_size=tokenizer.get_vocab_size())


def logits(folder):
    with torch.inference_mode():
        return load_hf(folder)(torch.arange(20)[None], use_cache=False).logits


@pytest.mark.parametrize(("kind", "grid", "bound"), [("F32", None, 0.0), ("Q8_0", "Q8_0 g32", 0.1),
                                                     ("Q4_1", "Q4_1 g32", 0.9)])
def test_the_model_comes_back(tmp_path, source, tokenizer, kind, grid, bound):
    path = write_gguf(tmp_path / "m.gguf", source, tokenizer, kind=gguf.GGMLQuantizationType[kind])
    folder = resolve_model(path)
    assert folder == tmp_path / "m-bf16"
    assert resolve_model(path) == folder
    assert source_grid_of(folder) == grid
    expected, found = logits(source), logits(folder)
    assert (found - expected).pow(2).mean().sqrt() <= bound * expected.pow(2).mean().sqrt()
    assert not list(tmp_path.glob(".*partial"))


def test_the_tokenizer_and_template_come_back(tmp_path, source, tokenizer):
    ours = Tokenizer.open(resolve_model(write_gguf(tmp_path / "m.gguf", source, tokenizer)))
    for text in [*TEXT[:3], "1234567890", "  spaces\n\n<|e|>"]:
        tokenizer.encode_special_tokens = True
        assert ours.encode(text, bos=False) == tokenizer.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text)) == text
    assert (ours.bos_id, ours.eos_ids, ours.adds_bos) == (0, (1,), True)
    assert ours.chat([{"role": "user", "content": "hi"}])[-1] == 1


@pytest.mark.parametrize(("options", "what"), [
    ({"architecture": "mamba"}, "mamba"), ({"pre": "tekken"}, "tekken"),
    ({"spoil": "blk.1.ffn_up.weight"}, "blk.1.ffn_up.weight holds NaN"),
    ({"fields": ["llama.expert_count"]}, "expert_count")])
def test_what_is_not_understood_is_refused(tmp_path, source, tokenizer, options, what):
    with pytest.raises(CalibError, match=what.replace(".", r"\.")):
        resolve_model(write_gguf(tmp_path / "m.gguf", source, tokenizer, **options))
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == ["m.gguf"]


def test_a_tokenizer_beside_the_file_wins(tmp_path, source, tokenizer):
    path = write_gguf(tmp_path / "m.gguf", source, tokenizer, pre="tekken")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.open(resolve_model(path)).encode("the fox") == tokenizer.encode("the fox").ids


def test_a_changed_file_is_converted_again(tmp_path, source, tokenizer):
    path = write_gguf(tmp_path / "m.gguf", source, tokenizer, kind=gguf.GGMLQuantizationType.F32)
    folder = resolve_model(path)
    kept = (folder / "config.json").stat().st_ino
    assert (resolve_model(path) / "config.json").stat().st_ino == kept
    path.unlink()
    write_gguf(path, source, tokenizer, kind=gguf.GGMLQuantizationType.Q8_0)
    assert resolve_model(path) == folder
    assert source_grid_of(folder) == "Q8_0 g32"


def test_a_folder_that_is_no_conversion_is_left_alone(tmp_path, source, tokenizer):
    path = write_gguf(tmp_path / "m.gguf", source, tokenizer)
    own = tmp_path / "m-bf16"
    own.mkdir()
    (own / "config.json").write_text("{}")
    with pytest.raises(CalibError, match=r"was not converted from m\.gguf"):
        resolve_model(path)
    assert (own / "config.json").read_text() == "{}"


def test_a_truncated_file_is_named(tmp_path, source, tokenizer):
    path = write_gguf(tmp_path / "m.gguf", source, tokenizer)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(MissingWeightsError, match=r"m\.gguf"):
        resolve_model(path)
