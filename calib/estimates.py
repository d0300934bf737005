"""Estimates of a calibration: memory, time, disk; and who will load what comes out.

The time is floating-point work divided by this machine's speed, measured on the spot with one small product, because a
laptop and a server differ by a hundred. What other runtimes load was read in their sources (versions of mid-2026).
"""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from calib.recipe import LayoutName, Recipe
from calib.scheme import Frozen, Grid

MIB = 1024**2
#: Python, torch, transformers and modelopt before any weight; seen 0.9 GiB.
_BASE_BYTES = 1024 * MIB


class Loader(Frozen):
    """Whether a runtime loads the result. From reading its source, unless the note says it was run."""

    runtime: str
    loads: bool
    note: str = ""


def memory_bytes(config: dict[str, Any], parameters: int, recipe: Recipe, length: int) -> int:
    """fp32 weights, one batch of activations with logits, and the result that is being written."""
    if recipe.method == "none":
        return _BASE_BYTES + 2 * parameters
    tokens = 8 * length
    activations = 4 * tokens * (6 * config["hidden_size"] + 3 * config["intermediate_size"])
    logits = 2 * 4 * 4 * length * config["vocab_size"]
    return _BASE_BYTES + 4 * parameters + 2 * parameters + activations + logits


def _passes(recipe: Recipe, kv: Grid, length: int) -> float:
    """How many tokens go through every linear."""
    tokens = float(recipe.rows * length if recipe.calibrates_activations or kv.quantized else 0)
    if recipe.method == "awq_lite":
        steps = round(1 / (recipe.alpha_step or 1.0)) + 1
        tokens *= 2 + steps
    if len(recipe.alphas) > 1:
        tokens += len(recipe.alphas) * recipe.choose_tokens
    return tokens


def seconds(shapes: dict[str, tuple[int, int]], parameters: int, recipe: Recipe, kv: Grid, length: int,
            num_layers: int) -> float:
    """Floating-point work at the speed of this machine, measured now on one product, plus loading and writing."""
    tokens = _passes(recipe, kv, length) + (recipe.protect > 0) * num_layers * recipe.choose_tokens
    work = 2.0 * tokens * sum(rows * columns for rows, columns in shapes.values())
    loading = parameters * 6 / 300e6
    return round(loading + (8.0 if tokens else 1.0) + 1.5 * work / _flops_per_second(), 1)


def _flops_per_second() -> float:
    left, right = torch.ones(512, 768), torch.ones(768, 768)
    torch.mm(left, right)
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - start)
    return 2.0 * 512 * 768 * 768 / best


def free_bytes(out: Path) -> int:
    """Free bytes on the disk that ``out`` will lie on."""
    place = out.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def loaders(layout: LayoutName, dtype: str) -> tuple[Loader, ...]:
    """Who loads a checkpoint of ``layout`` whose weights are ``dtype``."""
    source = "by its source, not run"
    rows: dict[tuple[str, str], dict[str, tuple[bool, str]]] = {
        ("modelopt", "fp8_e4m3"): {"vLLM": (True, source), "SGLang": (True, source), "TensorRT-LLM": (True, source)},
        ("modelopt", "int4"): {"vLLM": (False, "refuses modelopt W4A16_AWQ"), "SGLang": (False, "no loader"),
                               "TensorRT-LLM": (True, source)},
        ("compressed-tensors", "int8"): {"vLLM": (True, source), "SGLang": (True, source),
                                         "TensorRT-LLM": (False, "takes int8 for fp8")},
        ("compressed-tensors", "int4"): {"vLLM": (True, source), "SGLang": (True, source),
                                         "TensorRT-LLM": (False, "no int4 branch")},
        ("compressed-tensors", "fp8_e4m3"): {"vLLM": (True, source), "SGLang": (True, source),
                                             "TensorRT-LLM": (False, "per-tensor static raises")},
        ("compressed-tensors", "bf16"): {"vLLM": (True, source), "SGLang": (False, "not verified"),
                                         "TensorRT-LLM": (False, "not verified")},
        ("hf", "bf16"): dict.fromkeys(("transformers", "vLLM", "SGLang", "TensorRT-LLM"), (True, source))}
    found = rows[layout, dtype]
    plain = Loader(runtime="transformers", loads=layout == "hf", note="" if layout == "hf" else
                   "modelopt exports load silently wrong" if layout == "modelopt" else
                   "needs the compressed-tensors package, not run")
    return (Loader(runtime="this toolkit", loads=True, note="tested"), plain,
            *(Loader(runtime=name, loads=loads, note=note) for name, (loads, note) in found.items()
              if name != "transformers"))
