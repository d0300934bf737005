"""What the headers of a folder must say together, whatever its layout: nothing is a number without its scale.

A layout finds its quantized modules by a tensor of each (weight_scale, qweight). A module that has lost that tensor
would count as unquantized, and its codes would be taken for weights; one that has lost its input_scale would be
quantized otherwise than it was calibrated; and a scale that no Scheme asks for would be left out in silence. All three
give a model that runs and is wrong, and all three can be seen before a weight is read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from calib.errors import CalibError
from calib.formats.hf import MissingWeightsError, Shards, TensorMeta
from calib.scheme import Scheme

#: dtypes of everything that is no code: unquantized weights, norms, biases, scales.
FLOATS = ("BF16", "F16", "F32", "F64")
#: Tensors of a quantized module that are codes or places of codes.
_CODES = frozenset({"weight", "weight_packed", "weight_zero_point", "input_zero_point", "weight_shape", "weight_g_idx",
                    "g_idx", "qweight", "qzeros"})
#: What only means something beside codes.
_BESIDE = frozenset({"weight_scale", "input_scale", "pre_quant_scale", "scales", *_CODES - {"weight"}})
_IN_LAYER = re.compile(r"(.+?\.\d+)\.(.+)")
_AGAIN = "The checkpoint is damaged or incomplete: copy or download it again."


class MissingTensorError(CalibError):
    """A tensor without which others of the folder mean something else."""

    code = "missing_tensor"


def check_coherent(shards: Shards, schemes: Mapping[str, Scheme], quantized: bool) -> None:
    """Refuse codes without a scale, scales without codes or without a use, and dtypes that are no numbers.

    ``quantized``: config.json says that the folder is. MissingTensorError, MissingWeightsError or CalibError names the
    tensor and its dtype.
    """
    for name, meta in shards.items():  # first: other tensors of such a module are only its consequences
        module, _, leaf = name.rpartition(".")
        matrix = leaf == "weight" and len(meta.shape) > 1 and meta.dtype not in FLOATS
        if quantized and module not in schemes and (matrix or leaf == "weight_packed"):
            raise MissingTensorError(f"{shards.folder}: {module} has codes but no weight_scale: its {leaf} is "
                                     f"{meta.dtype}", _AGAIN)
    for name, meta in shards.items():
        module, _, leaf = name.rpartition(".")
        if module in schemes:
            _check_beside(shards, name, leaf, schemes[module])
        elif leaf in _BESIDE:
            raise CalibError(f"{shards.folder}: {name} belongs to a module without codes",
                             "A tensor of this module is missing, or this one was left over; fetch the folder again.")
        if module not in schemes or leaf not in _CODES:
            check_float(shards, name, meta)


def check_float(shards: Shards, name: str, meta: TensorMeta) -> None:
    """MissingWeightsError for a dtype that is a code without a scheme."""
    if meta.dtype not in FLOATS:
        scale = name.endswith(("_scale", ".scales"))
        what = "scales" if scale else "unquantized weights"
        raise MissingWeightsError(f"{shards.folder}: {name} is {meta.dtype}; {what} are {', '.join(FLOATS)}", _AGAIN
                                  if scale else "Weights and config.json are of two models, or the copy is incomplete.")


def _check_beside(shards: Shards, name: str, leaf: str, scheme: Scheme) -> None:
    if leaf == "input_scale" and (scheme.activation is None or scheme.activation.dynamic):
        grid = scheme.activation or "16-bit"
        raise CalibError(f"{shards.folder}: {name} has no effect: the module's activations are {grid}",
                         "config.json does not belong to these weights, or the scale was left over; remove it.")


def check_all_or_none(shards: Shards, modules: Iterable[str], leaf: str) -> None:
    """MissingTensorError where some of ``modules`` have a tensor and others do not."""
    known = list(modules)
    lacking = [module for module in known if f"{module}.{leaf}" not in shards]
    if 0 < len(lacking) < len(known):
        raise MissingTensorError(f"{shards.folder}: {lacking[0]}.{leaf} is missing; {len(known) - len(lacking)} of "
                                 f"{len(known)} modules quantized like it have one",
                                 f"All have it or none. {_AGAIN}")


def alike(modules: Mapping[str, str]) -> list[list[str]]:
    """Modules (with their algorithms) that must have the same tensors: those of one name in layers where the same
    modules have that algorithm.

    Where one reader of an input is left in bf16, its neighbours cannot fold their scales into the norm before them, so
    that such a layer is compared with its like only.
    """
    places = {module: found.groups() for module in modules if (found := _IN_LAYER.match(module))}
    layers: dict[tuple[str, str], set[str]] = defaultdict(set)
    for module, (layer, name) in places.items():
        layers[layer, modules[module]].add(name)
    groups: dict[tuple[str, str, frozenset[str]], list[str]] = defaultdict(list)
    for module, (layer, name) in places.items():
        algorithm = modules[module]
        groups[algorithm, name, frozenset(layers[layer, algorithm])].append(module)
    return list(groups.values())
