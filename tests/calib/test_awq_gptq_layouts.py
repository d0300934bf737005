"""AutoAWQ's and GPTQ's layouts by hand-made words, both GPTQ versions, and what neither can hold."""

import json

import pytest
import torch
from safetensors.torch import save_file

from calib.checkpoint import QuantizedCheckpoint
from calib.errors import CalibError
from calib.formats.awq import AwqLayout, pack_outputs, unpack_outputs
from calib.formats.compressed_tensors import CompressedTensorsLayout, pack_columns, unpack_columns
from calib.formats.gptq import GptqLayout
from calib.scheme import BF16, Grid, PerChannel, PerGroup, PerToken, Scheme

MODULE = "model.layers.0.self_attn.k_proj"
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32}
SYM = Scheme(weight=Grid(dtype="int4", granularity=PerGroup(size=16)))
ASYM = Scheme(weight=SYM.weight.model_copy(update={"symmetric": False}))
INT8 = Scheme(weight=Grid(dtype="int8", granularity=PerChannel()))


def stream(scheme, seed=0):
    generator = torch.Generator().manual_seed(seed)
    low, high = (-8, 8) if scheme.weight.symmetric else (0, 16)
    tensors = {f"{MODULE}.weight": torch.randint(low, high, (8, 32), generator=generator, dtype=torch.int8),
               f"{MODULE}.weight_scale": (torch.rand(8, 2, generator=generator) + 0.1).half().float()}
    if not scheme.weight.symmetric:
        tensors[f"{MODULE}.weight_zero"] = torch.randint(0, 16, (8, 2), generator=generator).float()
    if scheme.act_order:
        tensors[f"{MODULE}.g_idx"] = (torch.arange(32) % 2).to(torch.int32)
    return tensors | {"model.norm.weight": torch.ones(32, dtype=torch.bfloat16)}


def test_autoawq_interleaves_eight_outputs_in_a_word():
    words = pack_outputs(torch.arange(8, dtype=torch.int8)[None])
    assert [word & 0xFFFFFFFF for word in words.flatten().tolist()] == [0x75316420]
    every = torch.randint(0, 16, (3, 32), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    assert torch.equal(unpack_outputs(pack_outputs(every)), every)


def test_bytes_are_packed_four_to_a_word():
    words = pack_columns(torch.tensor([[1, 2, 3, 255, 128]], dtype=torch.int16), 8)
    assert [word & 0xFFFFFFFF for word in words.flatten().tolist()] == [0xFF030201, 0x80]
    assert unpack_columns(words, 5, 8).tolist() == [[1, 2, 3, 255, 128]]


@pytest.mark.parametrize(("layout", "scheme"), [(AwqLayout(), ASYM), (GptqLayout(), SYM),
                                               (GptqLayout(), SYM.model_copy(update={"act_order": True}))])
def test_write_then_read_is_the_same_stream(tmp_path, layout, scheme):
    expected = stream(scheme)
    layout.write(tmp_path, CONFIG, {MODULE: scheme}, BF16, expected.items())
    opened = QuantizedCheckpoint.open(tmp_path)
    assert (opened.layout.name, opened.schemes) == (layout.name, {MODULE: scheme})
    found = dict(opened.tensors())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in expected.items())


@pytest.mark.parametrize(("version", "stored"), [("gptq", 5), ("gptq_v2", 6)])
def test_gptqs_first_version_stores_zero_points_less_one(tmp_path, version, stored):
    codes = torch.randint(0, 16, (32, 8), generator=torch.Generator().manual_seed(2), dtype=torch.int8)
    save_file({f"{MODULE}.qweight": pack_columns(codes.T).T.contiguous(),
               f"{MODULE}.qzeros": pack_columns(torch.full((2, 8), stored)),
               f"{MODULE}.scales": torch.ones(2, 8, dtype=torch.float16),
               f"{MODULE}.g_idx": (torch.arange(32) // 16).to(torch.int32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {
        "quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "checkpoint_format": version}}))
    found = dict(QuantizedCheckpoint.open(tmp_path).tensors())
    assert (found[f"{MODULE}.weight_zero"] == 6).all()
    assert torch.equal(found[f"{MODULE}.weight"], codes.T)


@pytest.mark.parametrize(("layout", "scheme", "what"), [
    (AwqLayout(), SYM, "awq layout cannot hold"), (GptqLayout(), ASYM, "gptq layout cannot hold"),
    (AwqLayout(), INT8, "awq layout cannot hold")])
def test_what_a_layout_cannot_hold_is_refused(tmp_path, layout, scheme, what):
    with pytest.raises(CalibError, match=what):
        layout.write(tmp_path, CONFIG, {MODULE: scheme}, BF16, [])
    assert not any(tmp_path.iterdir())


def test_a_scale_that_float16_would_change_is_refused(tmp_path):
    tensors = stream(ASYM) | {f"{MODULE}.weight_scale": torch.full((8, 2), 0.1)}
    with pytest.raises(CalibError, match="float16 cannot"):
        AwqLayout().write(tmp_path, CONFIG, {MODULE: ASYM}, BF16, tensors.items())


def test_a_folder_of_two_schemes_names_the_smaller_group(tmp_path):
    """Most modules are dynamic int8; one is weight-only int8, packed into words: mixed-precision, and read back so."""
    token = Scheme(weight=INT8.weight, activation=Grid(dtype="int8", granularity=PerToken(), dynamic=True))
    schemes = {"a.one": token, "a.two": token, "lm_head": INT8}
    generator = torch.Generator().manual_seed(3)
    tensors = {f"{name}.{leaf}": value for name in schemes for leaf, value in (
        ("weight", torch.randint(-128, 128, (8, 32), generator=generator, dtype=torch.int8)),
        ("weight_scale", torch.rand(8, generator=generator) + 0.1))}
    CompressedTensorsLayout().write(tmp_path, CONFIG, schemes, BF16, tensors.items())
    section = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert section["format"] == "mixed-precision"
    assert [group["targets"] for group in section["config_groups"].values()] == [["Linear"], ["lm_head"]]
    assert "lm_head" not in section["ignore"]
    opened = QuantizedCheckpoint.open(tmp_path)
    assert opened.schemes == schemes
    found = dict(opened.tensors())
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in tensors.items())
