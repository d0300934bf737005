"""What the headers of a folder say together: no code without its scale, no scale without its use, in every layout."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from calib.checkpoint import QuantizedCheckpoint
from calib.errors import CalibError
from calib.formats.awq import AwqLayout
from calib.formats.coherence import MissingTensorError, alike
from calib.formats.compressed_tensors import CompressedTensorsLayout
from calib.formats.gptq import GptqLayout
from calib.formats.hf import MissingWeightsError
from calib.formats.modelopt import ModeloptLayout
from calib.grids import too_large
from calib.layers import scale_shape
from calib.scheme import BF16, Grid, PerBlock, PerChannel, PerGroup, PerToken, Scheme
from calib.verify import verify_checkpoint

MODULES = [f"model.layers.{layer}.{name}" for layer in range(3) for name in ("self_attn.o_proj", "mlp.down_proj")]
LOST = MODULES[2]
CONFIG = {"architectures": ["LlamaForCausalLM"]}
FP8, TOKEN = Grid(dtype="fp8_e4m3"), Grid(dtype="fp8_e4m3", granularity=PerToken(), dynamic=True)
FP8_DYNAMIC = Scheme(weight=Grid(dtype="fp8_e4m3", granularity=PerChannel()), activation=TOKEN)
FP8_BLOCK = Scheme(weight=Grid(dtype="fp8_e4m3", granularity=PerBlock(rows=4, cols=16)))
FP8_STATIC = Scheme(weight=FP8, activation=FP8)
INT8 = Scheme(weight=Grid(dtype="int8", granularity=PerChannel()))
INT8_DYNAMIC = Scheme(weight=INT8.weight, activation=Grid(dtype="int8", granularity=PerToken(), dynamic=True))
INT4 = Scheme(weight=Grid(dtype="int4", granularity=PerGroup(size=16)))
INT4_PRE = Scheme(weight=INT4.weight, pre_quant_scale=True)
INT4_ASYM = Scheme(weight=INT4.weight.model_copy(update={"symmetric": False}))
COMPRESSED, MODELOPT = CompressedTensorsLayout(), ModeloptLayout()


def written(folder, layout, scheme, change=lambda tensors: None, modules=MODULES):
    """A folder of some small modules, changed afterwards as damage would."""
    stream = {"model.norm.weight": torch.ones(32, dtype=torch.bfloat16)}
    for module in modules:
        codes = torch.ones(8, 32, dtype=torch.float8_e4m3fn if scheme.weight.dtype == "fp8_e4m3" else torch.int8)
        stream |= {f"{module}.weight": codes, f"{module}.weight_scale": torch.ones(scale_shape(scheme.weight, (8, 32)))}
        if not scheme.weight.symmetric:
            stream[f"{module}.weight_zero"] = torch.ones(8, 2)
        if scheme.activation is not None and not scheme.activation.dynamic:
            stream[f"{module}.input_scale"] = torch.tensor(0.5)
        if scheme.pre_quant_scale:
            stream[f"{module}.pre_quant_scale"] = torch.ones(32)
    layout.write(folder, CONFIG, dict.fromkeys(modules, scheme), BF16, stream.items())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def named(value):
    """An id that is the same in every process: a layout's name, or what a scheme or a leaf says of itself."""
    return getattr(value, "name", str(value))


@pytest.mark.parametrize(("layout", "scheme"), [
    (COMPRESSED, FP8_DYNAMIC), (COMPRESSED, FP8_BLOCK), (COMPRESSED, INT8), (COMPRESSED, INT8_DYNAMIC),
    (COMPRESSED, INT4), (COMPRESSED, INT4_ASYM), (MODELOPT, FP8_STATIC), (MODELOPT, INT4)], ids=named)
def test_codes_that_lost_their_scale_are_named(tmp_path, layout, scheme):
    folder = written(tmp_path, layout, scheme, lambda tensors: tensors.pop(f"{LOST}.weight_scale"))
    with pytest.raises(MissingTensorError, match=f"{LOST} has codes but no weight_scale: its weight.* is "):
        QuantizedCheckpoint.open(folder)
    assert [fault.code for fault in verify_checkpoint(folder)] == ["missing_tensor"]


@pytest.mark.parametrize(("layout", "scheme", "leaf"), [(AwqLayout(), INT4_ASYM, "qweight"),
                                                        (GptqLayout(), INT4, "qweight")], ids=named)
def test_scales_that_lost_their_codes_are_named(tmp_path, layout, scheme, leaf):
    folder = written(tmp_path, layout, scheme, lambda tensors: tensors.pop(f"{LOST}.{leaf}"))
    with pytest.raises(CalibError, match=f"{LOST}.* belongs to a module without codes"):
        QuantizedCheckpoint.open(folder)


def test_lost_words_are_named_as_they_lie(tmp_path):
    folder = written(tmp_path, COMPRESSED, INT8, lambda tensors: tensors.pop(f"{LOST}.weight_packed"))
    with pytest.raises(CalibError, match=f"{LOST}.weight_packed is missing"):
        QuantizedCheckpoint.open(folder)


@pytest.mark.parametrize(("scheme", "leaf"), [(FP8_STATIC, "input_scale"), (INT4_PRE, "pre_quant_scale")], ids=named)
def test_a_tensor_that_its_like_have_must_not_be_missing(tmp_path, scheme, leaf):
    folder = written(tmp_path, MODELOPT, scheme, lambda tensors: tensors.pop(f"{LOST}.{leaf}"))
    like = len(MODULES) if leaf == "input_scale" else 3
    with pytest.raises(MissingTensorError, match=f"{LOST}.{leaf} is missing; {like - 1} of {like} modules"):
        QuantizedCheckpoint.open(folder)
    assert [fault.code for fault in verify_checkpoint(folder)] == ["missing_tensor"]


def test_int8_modules_are_all_static_or_all_dynamic(tmp_path):
    tensors = {}
    for module in MODULES:
        tensors |= {f"{module}.weight": torch.ones(8, 32, dtype=torch.int8), f"{module}.weight_scale": torch.ones(8)}
    (tmp_path / "config.json").write_text(json.dumps(
        CONFIG | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}}))
    save_file(tensors, tmp_path / "model.safetensors")
    assert set(QuantizedCheckpoint.open(tmp_path).schemes.values()) == {INT8_DYNAMIC}
    save_file(tensors | {f"{LOST}.input_scale": torch.tensor(1.0)}, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensorError, match=f"{MODULES[1]}.input_scale is missing; 1 of 6"):
        QuantizedCheckpoint.open(tmp_path)


def test_layers_are_compared_with_their_like():
    """Beside a module that is kept, a neighbour cannot fold its scales: such a layer is another case."""
    whole = {f"model.layers.{layer}.self_attn.{name}_proj": "W4A16_AWQ" for layer in (0, 1) for name in "qk"}
    torn = {"model.layers.2.self_attn.q_proj": "W4A16_AWQ", "lm_head": "W4A16_AWQ"}
    raised = {"model.layers.3.self_attn.q_proj": "W8A16", "model.layers.3.self_attn.k_proj": "W8A16"}
    assert sorted(map(len, alike(whole | torn | raised))) == [1, 1, 1, 2, 2]


@pytest.mark.parametrize(("layout", "scheme"), [(COMPRESSED, INT8), (COMPRESSED, FP8_DYNAMIC), (MODELOPT, INT4)],
                         ids=named)
def test_an_input_scale_that_nothing_reads_is_refused(tmp_path, layout, scheme):
    folder = written(tmp_path, layout, scheme, lambda tensors: tensors.update(
        {f"{LOST}.input_scale": torch.ones(1)}))
    with pytest.raises(CalibError, match=f"{LOST}.input_scale has no effect: the module's activations are "):
        QuantizedCheckpoint.open(folder)


@pytest.mark.parametrize(("name", "dtype", "found", "what"), [
    ("model.norm.weight", torch.int8, "I8", "unquantized weights"),
    ("model.norm.weight", torch.float8_e4m3fn, "F8_E4M3", "unquantized weights"),
    (f"{LOST}.weight_scale", torch.int32, "I32", "scales")])
def test_codes_are_no_numbers(tmp_path, name, dtype, found, what):
    folder = written(tmp_path, COMPRESSED, INT8_DYNAMIC,
                     lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(MissingWeightsError, match=f"{name} is {found}; {what} are BF16, F16, F32, F64"):
        QuantizedCheckpoint.open(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32, torch.bool])
def test_an_unquantized_folder_holds_no_codes(tmp_path, dtype):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({f"{LOST}.weight": torch.ones(8, 32).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(MissingWeightsError, match=rf"{LOST}.weight is \w+; unquantized weights are"):
        QuantizedCheckpoint.open(tmp_path)


def test_codes_of_another_grid_are_not_converted(tmp_path):
    folder = written(tmp_path, COMPRESSED, INT8_DYNAMIC, lambda tensors: tensors.update(
        {f"{LOST}.weight": torch.ones(8, 32).to(torch.float8_e4m3fn)}))
    with pytest.raises(CalibError, match=f"{LOST}.weight is F8_E4M3; int8 channel codes lie as I8"):
        QuantizedCheckpoint.open(folder)


def test_scales_beyond_half_precision_are_a_fault(tmp_path):
    assert too_large(INT8.weight, torch.tensor([1.0, 515.0])) == ""
    assert "holds 516: weights on int8 channel would reach" in too_large(INT8.weight, torch.tensor([516.0, 1.0]))
    folder = written(tmp_path, COMPRESSED, INT8, lambda tensors: tensors[f"{LOST}.weight_scale"].fill_(1e30))
    faults = [(fault.code, fault.where) for fault in verify_checkpoint(folder)]
    assert ("too_large", f"{LOST}.weight_scale") in faults
