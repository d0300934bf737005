"""Packing, both layouts there and back, what is refused, and shards that are strictly opened."""

import json

import pytest
import torch
from safetensors.torch import save_file

from calib.checkpoint import QuantizedCheckpoint
from calib.errors import CalibError, UnknownNameError
from calib.formats.compressed_tensors import CompressedTensorsLayout, pack_columns, unpack_columns
from calib.formats.hf import MissingWeightsError, Shards, write_shards
from calib.formats.modelopt import ModeloptLayout, pack_int4, unpack_int4
from calib.grids import dequantize_weight, fake_quantize, quantize_weight
from calib.scheme import BF16, Grid, PerBlock, PerChannel, PerGroup, PerToken, Scheme

FP8 = Grid(dtype="fp8_e4m3")
INT8 = Scheme(weight=Grid(dtype="int8", granularity=PerChannel()),
              activation=Grid(dtype="int8", granularity=PerToken(), dynamic=True))
INT4 = Grid(dtype="int4", granularity=PerGroup(size=16))
MODULE, ATTENTION = "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn"
CONFIG = {"architectures": ["LlamaForCausalLM"]}


def codes(dtype, shape=(6, 32), low=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype == "fp8_e4m3":
        return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    high = {"int8": 128, "int4": 8}[dtype] if low is None else 16
    return torch.randint(-high if low is None else low, high, shape, generator=generator, dtype=torch.int8)


def stream(scheme, *, kv=BF16, **extra):
    from calib.layers import scale_shape
    generator = torch.Generator().manual_seed(1)
    low = None if scheme.weight.symmetric else 0
    tensors = {f"{MODULE}.weight": codes(scheme.weight.dtype, low=low),
               f"{MODULE}.weight_scale": torch.rand(scale_shape(scheme.weight, (6, 32)), generator=generator) + 0.1}
    tensors |= {f"{MODULE}.{leaf}": value for leaf, value in extra.items()}
    if kv.quantized:
        tensors |= {f"{ATTENTION}.k_scale": torch.tensor(0.5), f"{ATTENTION}.v_scale": torch.tensor(0.25)}
    return tensors | {"model.norm.weight": torch.ones(32, dtype=torch.bfloat16)}


CASES = [
    (CompressedTensorsLayout(), INT8, BF16, {}),
    (CompressedTensorsLayout(), INT8.model_copy(update={"kv": FP8}), FP8, {}),
    (CompressedTensorsLayout(), Scheme(weight=FP8, activation=FP8), BF16, {"input_scale": torch.tensor(0.75)}),
    (CompressedTensorsLayout(), Scheme(weight=Grid(dtype="fp8_e4m3", granularity=PerBlock(rows=4, cols=16))), BF16, {}),
    (CompressedTensorsLayout(), Scheme(weight=INT4), BF16, {"bias": torch.ones(6)}),
    (CompressedTensorsLayout(), Scheme(weight=INT4.model_copy(update={"symmetric": False})), BF16,
     {"weight_zero": torch.arange(12.0).reshape(6, 2)}),
    (CompressedTensorsLayout(), Scheme(weight=INT4, act_order=True), BF16,
     {"g_idx": (torch.arange(32, dtype=torch.int32) % 2)}),
    (ModeloptLayout(), Scheme(weight=FP8, activation=FP8, kv=FP8), FP8, {"input_scale": torch.tensor(0.75)}),
    (ModeloptLayout(), Scheme(weight=INT4), BF16, {}),
    (ModeloptLayout(), Scheme(weight=INT4, pre_quant_scale=True), BF16, {"pre_quant_scale": torch.arange(1.0, 33.0)}),
]


@pytest.mark.parametrize(("layout", "scheme", "kv", "extra"), CASES, ids=range(len(CASES)))
def test_write_then_read_is_the_same_stream(tmp_path, layout, scheme, kv, extra):
    expected = stream(scheme, kv=kv, **extra)
    layout.write(tmp_path, CONFIG, {MODULE: scheme}, kv, expected.items())
    opened = QuantizedCheckpoint.open(tmp_path)
    assert (opened.layout.name, opened.schemes, opened.kv) == (layout.name, {MODULE: scheme}, kv)
    assert opened.config == CONFIG
    found = dict(opened.tensors())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].float(), tensor.float()), name


def test_int4_nibbles_lie_where_the_layouts_say():
    column = torch.tensor([[1], [-2], [7], [-8]], dtype=torch.int8)
    assert pack_int4(column).tolist() == [[0x1 | 0xE << 4], [0x7 | 0x8 << 4]]
    row = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 15, 9]], dtype=torch.int8)
    words = pack_columns(row)
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == [0xF6543210, 0x9]
    every = torch.arange(-8, 8, dtype=torch.int8).repeat(2, 3).reshape(16, 6)
    assert torch.equal(unpack_int4(pack_int4(every)), every)
    assert torch.equal(unpack_columns(pack_columns(every + 8), 6), every + 8)


def test_fp8_cast_kv_means_scales_of_one(tmp_path):
    scheme = Scheme(weight=FP8, activation=FP8, kv=FP8)
    tensors = stream(scheme, input_scale=torch.tensor(0.5))
    ModeloptLayout().write(tmp_path, CONFIG, {MODULE: scheme}, FP8, tensors.items())
    found = dict(QuantizedCheckpoint.open(tmp_path).tensors())
    assert found[f"{ATTENTION}.k_scale"] == found[f"{ATTENTION}.v_scale"] == 1.0


@pytest.mark.parametrize(("layout", "scheme", "what"), [
    (ModeloptLayout(), INT8, "cannot hold"),
    (CompressedTensorsLayout(), Scheme(weight=INT4, pre_quant_scale=True), "pre_quant_scale")])
def test_what_a_layout_cannot_hold_is_refused(tmp_path, layout, scheme, what):
    with pytest.raises(CalibError, match=what):
        layout.write(tmp_path, CONFIG, {MODULE: scheme}, BF16, [])
    assert not any(tmp_path.iterdir())


def test_modelopt_int8_without_input_scale_is_dynamic(tmp_path):
    save_file({f"{MODULE}.weight": codes("int8"), f"{MODULE}.weight_scale": torch.ones(6)},
              tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(
        CONFIG | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}}))
    assert QuantizedCheckpoint.open(tmp_path).schemes == {MODULE: INT8}


@pytest.mark.parametrize(("section", "tensors", "error", "what"), [
    ({"quant_method": "bitsandbytes"}, {}, UnknownNameError, "bitsandbytes"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {}, UnknownNameError, "NVFP4"),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, {}, UnknownNameError, "NVFP4"),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, {}, CalibError, "stores U8"),
    ({"quant_method": "modelopt", "quant_algo": "W8A16"}, {f"{MODULE}.weight_scale": torch.ones(5)}, CalibError,
     r"shape \[5\].*\[6\]"),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}}, {}, CalibError,
     "nvfp4"),
    (None, {}, CalibError, "no quantization_config")])
def test_unknown_or_contradictory_folders_are_refused(tmp_path, section, tensors, error, what):
    save_file({f"{MODULE}.weight": codes("int8"), f"{MODULE}.weight_scale": torch.ones(6)} | tensors,
              tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | ({"quantization_config": section} if section else {})))
    with pytest.raises(error, match=what):
        QuantizedCheckpoint.open(tmp_path)


def test_codes_without_scales_are_damage(tmp_path):
    save_file({f"{MODULE}.weight": codes("fp8_e4m3")}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(
        CONFIG | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}))
    with pytest.raises(CalibError, match="no weight_scale"):
        QuantizedCheckpoint.open(tmp_path)


def test_static_activations_need_their_scale(tmp_path):
    scheme = Scheme(weight=FP8, activation=FP8)
    CompressedTensorsLayout().write(tmp_path, CONFIG, {MODULE: scheme}, BF16, stream(scheme).items())
    with pytest.raises(CalibError, match="no input_scale"):
        QuantizedCheckpoint.open(tmp_path)


def test_shards_are_split_indexed_and_read_back_in_natural_order(tmp_path):
    tensors = {f"model.layers.{index}.weight": torch.full((8, 8), float(index)) for index in (10, 2, 1)}
    write_shards(tmp_path, tensors.items(), shard_bytes=600)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    shards = Shards(tmp_path)
    assert list(shards) == ["model.layers.1.weight", "model.layers.2.weight", "model.layers.10.weight"]
    assert all(torch.equal(shards.load(name), tensor) for name, tensor in tensors.items())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MissingWeightsError, match="is missing"):
        Shards(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_truncated_file_is_recognised_by_its_header(tmp_path, keep):
    write_shards(tmp_path, [("a", torch.ones(64))])
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(MissingWeightsError, match="safetensors"):
        Shards(tmp_path)


@pytest.mark.parametrize("grid", [Grid(dtype="int8", granularity=PerChannel()), FP8, INT4,
                                  Grid(dtype="fp8_e4m3", granularity=PerBlock(rows=4, cols=16))])
def test_rounding_a_weight_stays_within_half_a_step(grid):
    from calib.layers import scale_shape
    from calib.scheme import CODE_MAX
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(3))
    scale = torch.full(scale_shape(grid, (6, 32)), weight.abs().max().item() / CODE_MAX[grid.dtype])
    back = dequantize_weight(grid, quantize_weight(grid, weight, scale), scale)
    step = scale.max() * (1 if grid.dtype != "fp8_e4m3" else 32)
    assert (back - weight).abs().max() <= step / 2 * 1.001
    assert torch.equal(quantize_weight(grid, back, scale).float(), quantize_weight(grid, weight, scale).float())


def test_dynamic_token_scales_ignore_the_neighbours():
    grid = Grid(dtype="int8", granularity=PerToken(), dynamic=True)
    row = torch.randn(1, 32, generator=torch.Generator().manual_seed(4))
    loud = torch.cat((row, row * 1000, torch.zeros(1, 32)))
    assert torch.equal(fake_quantize(grid, loud, None)[:1], fake_quantize(grid, row, None))
    assert torch.equal(fake_quantize(grid, loud, None)[2], torch.zeros(32))
