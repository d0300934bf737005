"""Input and output lengths that loads are known by: what users do, and the mixes that official tables use.

``chat``, ``rag``, ``summarise``, ``code`` and ``agent`` are shapes of use; ``tensorrt_llm`` are the points of
TensorRT-LLM's performance overview, ``inferencex`` those of InferenceX's tables; ``cpu`` is sized for a processor and
for CI. A preset is a list of (ISL, OSL); each is a cell of its own, for a mean over unlike lengths says nothing.
"""

from __future__ import annotations

from calib.errors import UnknownNameError

PRESETS: dict[str, tuple[tuple[int, int], ...]] = {
    "chat": ((128, 128), (512, 256), (1024, 1024)),
    "rag": ((8192, 256),),
    "summarise": ((2048, 256),),
    "code": ((512, 128),),
    "agent": ((4096, 512), (16384, 512)),
    "tensorrt_llm": ((1000, 1000), (1024, 1024), (1024, 8192), (1024, 32768), (8192, 1024), (32768, 1024)),
    "inferencex": ((1024, 1024), (8192, 1024)),
    "cpu": ((64, 32),),
}


def preset(name: str) -> tuple[tuple[int, int], ...]:
    """UnknownNameError names the near match."""
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    return PRESETS[name]
