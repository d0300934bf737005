"""Bytes on disk from names and shapes alone, against files that were really written."""

import pytest
import torch

from calib.blocks import all_finite, any_nonzero
from calib.formats.hf import SINGLE, write_shards
from calib.scheme import BF16
from calib.sizes import Stored, files_bytes, stored_tensors

NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int8: "I8", torch.uint8: "U8", torch.int32: "I32",
         torch.int64: "I64", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}


def tensors(count):
    kinds = list(NAMES)
    return {f"model.layers.{index}.weight": torch.zeros(index % 7 + 1, 3, dtype=kinds[index % len(kinds)])
            for index in range(count)} | {"scale": torch.zeros(())}


def bytes_written(folder):
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("count", [0, 1, 5, 40, 137])
def test_one_file_to_the_byte(tmp_path, count):
    held = tensors(count)
    write_shards(tmp_path, held.items())
    stored = [Stored(name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in held.items()]
    assert files_bytes(stored) == (tmp_path / SINGLE).stat().st_size


@pytest.mark.parametrize("shard", [64, 100, 1000])
def test_many_files_to_the_byte(tmp_path, shard):
    held = tensors(60)
    write_shards(tmp_path, held.items(), shard)
    stored = [Stored(name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in held.items()]
    assert files_bytes(stored, shard) == bytes_written(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1


def test_an_unquantized_model_is_stored_in_natural_order():
    plain = {"model.layers.10.w.weight": (2, 2), "model.layers.9.w.weight": (2, 2), "lm_head.weight": (4, 2)}
    assert [one.name for one in stored_tensors("compressed-tensors", plain, {}, [], BF16)] == [
        "lm_head.weight", "model.layers.9.w.weight", "model.layers.10.w.weight"]


def test_a_tensor_is_looked_at_whole(monkeypatch):
    monkeypatch.setattr("calib.blocks.BLOCK", 8)
    tensor = torch.zeros(5, 5)
    assert all_finite(tensor)
    assert not any_nonzero(tensor)
    tensor[4, 4] = 1.0
    assert any_nonzero(tensor)
    tensor[4, 4] = float("inf")
    assert not all_finite(tensor)
    assert all_finite(torch.zeros(0))
    assert all_finite(torch.ones(3, dtype=torch.int8))
