"""Embedding, layers one by one, and head give the whole model's logits, bit for bit, whatever the family does between.

Sliding windows that alternate, two rotary bases, an embedding scale, norms around, softcaps, biases, fused qkv.
"""

import pytest
import torch
import transformers
from safetensors.torch import save_file

from calib.errors import CalibError
from calib.formats.hf import Shards
from calib.layer_model import embedded, head_model, one_layer, outside_names
from calib.layers import LLAMA
from calib.model import load_hf

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1,
         "eos_token_id": 2, "pad_token_id": 0}
WINDOWED = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES = {
    "llama": ("LlamaConfig", {"attention_bias": True, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", WINDOWED | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", WINDOWED),
    "phi3": ("Phi3Config", {"sliding_window": 5})}


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    name, changes = FAMILIES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SMALL | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def by_layers(folder, ids):
    shards, outputs = Shards(folder), []
    states = embedded(folder, LLAMA, shards, ids, rounded=False)
    with torch.inference_mode():
        for layer in range(4):
            one_layer(folder, LLAMA, shards, layer, outputs.append).model(states, use_cache=False)
            states = outputs[-1]
        return head_model(folder, LLAMA, shards, rounded=False)(states, use_cache=False).logits


def test_layers_one_by_one_are_the_whole_model(folder):
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        assert torch.equal(by_layers(folder, ids), whole(ids, use_cache=False).logits)
    inside = {name for name, _ in whole.named_parameters() if not name.startswith("model.layers.")}
    assert set(outside_names(folder, LLAMA)) == inside


def test_a_layer_keeps_its_name_and_names_what_is_broken(model_folder, tmp_path):
    shards = Shards(model_folder)
    names = {name for name, _ in one_layer(model_folder, LLAMA, shards, 1, lambda _: None).named_parameters()}
    assert "model.layers.1.self_attn.q_proj.weight" in names
    assert not any(".layers.0." in name for name in names)
    tensors = {name: parameter.detach().clone() for name, parameter in load_hf(model_folder).named_parameters()}
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("inf")
    (tmp_path / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CalibError, match=r"layers\.1\.mlp\.up_proj"):
        one_layer(tmp_path, LLAMA, Shards(tmp_path), 1, lambda _: None)
