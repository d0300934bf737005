"""Published config.json of models one knows, as far as calibration reads them."""

from __future__ import annotations

from typing import Any


def _config(architecture: str, model_type: str, hidden: int, inter: int, layers: int, heads: int, kv_heads: int,
            vocab: int, **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, "hidden_size": hidden,
            "intermediate_size": inter, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1,
            "eos_token_id": 2, "rope_theta": 10000.0, "torch_dtype": "bfloat16", **more}


_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
KNOWN: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _config("LlamaForCausalLM", "llama", 4096, 14336, 32, 32, 8, 128256, rope_theta=500000.0),
    "Llama-3.1-70B": _config("LlamaForCausalLM", "llama", 8192, 28672, 80, 64, 8, 128256, rope_theta=500000.0),
    "Mistral-7B-v0.3": _config("MistralForCausalLM", "mistral", 4096, 14336, 32, 32, 8, 32768, sliding_window=None,
                               rope_theta=1000000.0),
    "Qwen2.5-7B": _config("Qwen2ForCausalLM", "qwen2", 3584, 18944, 28, 28, 4, 152064, rope_theta=1000000.0,
                          use_sliding_window=False, sliding_window=131072, max_window_layers=28),
    "Qwen3-8B": _config("Qwen3ForCausalLM", "qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128,
                        rope_theta=1000000.0, attention_bias=False, use_sliding_window=False, sliding_window=None,
                        max_window_layers=36),
    "Gemma-2-9B": _config("Gemma2ForCausalLM", "gemma2", 3584, 14336, 42, 16, 8, 256000, head_dim=256,
                          query_pre_attn_scalar=256, sliding_window=4096, attn_logit_softcapping=50.0,
                          final_logit_softcapping=30.0, pad_token_id=0, **_GELU),
    "Gemma-3-1B": _config("Gemma3ForCausalLM", "gemma3_text", 1152, 6912, 26, 4, 1, 262144, head_dim=256,
                          query_pre_attn_scalar=256, sliding_window=512, rope_local_base_freq=10000.0,
                          sliding_window_pattern=6, pad_token_id=0, **{**_GELU, "rope_theta": 1000000.0}),
    "Phi-3-mini-4k": _config("Phi3ForCausalLM", "phi3", 3072, 8192, 32, 32, 32, 32064, pad_token_id=32000,
                             original_max_position_embeddings=4096, max_position_embeddings=4096,
                             sliding_window=2047),
    "Qwen3-30B-A3B": _config("Qwen3MoeForCausalLM", "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128,
                             num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
    "DeepSeek-V3": _config("DeepseekV3ForCausalLM", "deepseek_v3", 7168, 18432, 61, 128, 128, 129280,
                           n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, kv_lora_rank=512,
                           q_lora_rank=1536)}
