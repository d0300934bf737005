"""Does a quantized model still cut into shards? Tensor parallelism against groups, tiles and packing.

Over ``tp`` devices a column-parallel matrix (q, k, v, gate, up) is cut along its outputs, a row-parallel one (o, down)
along its inputs. A cut may not go through a quantization group: in / tp must be a multiple of the group size, and for
tiles both sides must fit. Runtimes find this out when they load (vllm-project/vllm issue 49949); a plan can say it
before anything is calibrated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from calib.errors import CalibError
from calib.scheme import Scheme

_ROW_PARALLEL = ("o_proj", "down_proj")


class ShardingError(CalibError):
    """The model, or its groups, do not divide by the number of devices."""

    code = "sharding"


def is_row_parallel(module: str) -> bool:
    """Whether a module is cut along its inputs."""
    return module.endswith(_ROW_PARALLEL)


def shard_columns(module: str, columns: int, tp: int) -> int:
    """Inputs of a module on one device."""
    return columns // tp if is_row_parallel(module) else columns


def check_heads(config: Mapping[str, Any], tp: int) -> None:
    """ShardingError when the heads do not divide. Key and value heads may also be repeated (tp a multiple of them)."""
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)

    def divides(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    if not divides(tp):
        works = [n for n in (1, 2, 4, 8, 16, 32, 64) if divides(n)]
        raise ShardingError(f"{heads} heads and {kv_heads} key-value heads do not divide over {tp} devices",
                            f"Among the powers of two, --tp {', '.join(map(str, works))} divide them.")


def check_modules(modules: Iterable[tuple[str, tuple[int, int], Scheme | None]], tp: int) -> None:
    """ShardingError that names the first matrix [out, in] whose cut goes through a group, a tile or a packed word."""
    for name, (rows, columns), scheme in modules:
        row_parallel = is_row_parallel(name)
        side, length = ("inputs", columns) if row_parallel else ("outputs", rows)
        if length % tp:
            raise ShardingError(f"{name} has {length} {side}, which do not divide over {tp} devices",
                                "Choose a smaller --tp.")
        if tp == 1 and _tiled(scheme):
            continue  # nothing is cut, and tiles at the far edges may be smaller
        unit, what = _unit(scheme, row_parallel)
        if length // tp % unit:
            fits = [n for n in (2, 4, 8, 16, 32) if length % n == 0 and length // n % unit == 0]
            hint = f"--tp {', '.join(map(str, fits))} would fit" if fits else "No --tp above 1 would fit"
            raise ShardingError(f"{name} has {length} {side}, {length // tp} on each of {tp} devices, and {what} of "
                                f"{unit} do not divide them", f"{hint}; or use a recipe with smaller groups.")


def _tiled(scheme: Scheme | None) -> bool:
    """Whether a weight's scales lie on tiles."""
    return scheme is not None and scheme.weight.granularity.kind == "block"


def _unit(scheme: Scheme | None, row_parallel: bool) -> tuple[int, str]:
    """What a cut must be a multiple of, and what that is."""
    if scheme is None:
        return 1, "nothing"
    kind = scheme.weight.granularity
    if kind.kind == "block":
        return (kind.cols if row_parallel else kind.rows), "tiles"
    if kind.kind == "group" and row_parallel:
        return kind.size, "groups"
    return (8, "packed words") if scheme.weight.dtype == "int4" else (1, "nothing")
