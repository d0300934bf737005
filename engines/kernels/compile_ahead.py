"""Compiling every kernel variant ahead of time, on all cores, and noticing one that was compiled too late.

Triton compiles a variant when it is first launched: half a second to a second each, one after the other, in the middle
of whatever was going on. An engine reaches a hundred variants. So:

1. ``collect`` runs launches with Triton's compile hook set: a variant that is not loaded yet is written down instead
   of compiled, and nothing is launched. (torch's own operators in between do run.)
2. ``compile_variants`` compiles what was collected in child processes, which need no GPU and have none: they know only
   the target. What they make lands in Triton's cache on disk, which is keyed by content.
3. Launching for real then takes milliseconds a variant, from that cache.

An empty file a variant, beside the cache, remembers that it was compiled, so that a warm start asks nobody.

``late`` lists what 3 did not find. After an engine is open ``CompileWatch`` counts: a variant that is loaded or
compiled then was missed by 1: a bug. All hooks are Triton's own (``knobs``).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton

_LOG = logging.getLogger(__name__)
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant: the jit function's module and name, its source's hash, and Triton's own description of the rest."""

    module: str
    name: str
    source: str
    data: str


_settled: set[int] = set()


def settle(function: Any) -> str:
    """A jit function's cache key, made after the keys of all that it calls.

    Triton 3.6 adds to a key the constants that callees use, but only of callees whose keys are known by then. So the
    key depended on what a process had compiled before, and most of what others had compiled was compiled again: 2.5 s
    a variant of decode attention.
    """
    if id(function) not in _settled:
        _settled.add(id(function))
        for name in function.fn.__code__.co_names:
            callee = function.__globals__.get(name)
            if isinstance(callee, triton.runtime.jit.JITCallable):
                settle(callee)
        function.hash = None
    return str(function.cache_key)


@contextmanager
def _hooked(knobs: Any, name: str, hook: Any) -> Iterator[None]:
    """One of Triton's hooks, as long as it lasts."""
    before = getattr(knobs, name)
    setattr(knobs, name, hook)
    try:
        yield
    finally:
        setattr(knobs, name, before)


@contextmanager
def collect() -> Iterator[dict[str, Variant]]:
    """Variants that launches inside would compile, by description. Those launches do nothing."""
    found: dict[str, Variant] = {}

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        data, source = _describe(compile), settle(fn.jit_function)
        found[f"{fn.module}.{fn.name} {data}"] = Variant(fn.module, fn.name, source, data)
        return True

    with _hooked(triton.knobs.runtime, "jit_cache_hook", hook):
        yield found


def _describe(compile: dict[str, Any]) -> str:
    """Triton's description as JSON with tagged constants: its own form cannot tell the string "int8" from a type."""
    data = json.loads(compile["specialization_data"])
    names = [type(value).__name__ for value in compile["constants"].values()]
    data["constant_tags"] = [name if name in ("dtype", "constexpr") else "" for name in names]
    return json.dumps(data)


def _tuples(item: Any) -> Any:
    """JSON's lists back to the tuples they were."""
    return tuple(_tuples(part) for part in item) if isinstance(item, list) else item


def _constant(value: Any, tag: str) -> Any:
    import triton.language as tl

    if tag == "dtype":
        return tl.dtype(value)
    return tl.constexpr(value["constexpr"]) if tag == "constexpr" else value


def _compile_described(function: Any, data: dict[str, Any]) -> Any:
    """Compile a jit function (Triton or Gluon) as ``_describe`` says."""
    settle(function)
    _, _, target, backend, _ = function.create_binder()
    constants = {_tuples(path): _constant(value, tag) for path, value, tag in zip(
        data["constant_keys"], data["constant_vals"], data["constant_tags"], strict=True)}
    attributes = {_tuples(path): value for path, value in zip(data["attrs_keys"], data["attrs_vals"], strict=True)}
    signature = {name: _tuples(value) for name, value in data["signature"].items()}
    options = backend.parse_options({name: _tuples(value) for name, value in data["options"].items()})
    return triton.compile(function.ASTSource(function, signature, constants, attributes), target=target,
                          options=options.__dict__)


def compile_variants(variants: Sequence[Variant], capability: int, workers: int | None = None) -> dict[str, str]:
    """Compile for ``sm_<capability>`` in child processes. Returns description -> error text of those that failed.

    RuntimeError when the child process itself dies.
    """
    missing = [variant for variant in variants if not _mark(variant, capability).is_file()]
    if not missing:
        return {}
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    order = {"capability": capability, "workers": workers or os.cpu_count() or 1,
             "variants": [asdict(variant) for variant in missing]}
    done = subprocess.run([sys.executable, "-m", "engines.kernels.compile_ahead"], input=json.dumps(order),
                          capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"the compile process ended with {done.returncode}: {done.stderr[-2000:]}")
    errors = json.loads(done.stdout.splitlines()[-1])
    failed: dict[str, str] = {}
    for variant, error in zip(missing, errors, strict=True):
        if error:
            failed[f"{variant.module}.{variant.name} {variant.data}"] = error
        else:
            _mark(variant, capability).parent.mkdir(parents=True, exist_ok=True)
            _mark(variant, capability).touch()
    return failed


def _mark(variant: Variant, capability: int) -> Path:
    """The file that says that exactly this was compiled into this cache."""
    content = json.dumps(["settled keys", triton.__version__, capability, variant.module, variant.name, variant.source,
                          variant.data])
    return Path(triton.knobs.cache.dir) / "compiled-ahead" / hashlib.sha256(content.encode()).hexdigest()[:32]


@contextmanager
def late() -> Iterator[list[str]]:
    """Names of the kernels that are compiled inside, one by one, instead of being found in the cache on disk: each was
    missed before, or compiled under another key. They are logged when it ends."""
    found: list[str] = []

    def listener(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            found.append(src.name)

    try:
        with _hooked(triton.knobs.compilation, "listener", listener):
            yield found
    finally:
        if found:
            _LOG.warning("%d kernel variants were compiled one by one: %s", len(found), ", ".join(sorted({*found})))


class CompileWatch:
    """Counts variants that are loaded or compiled while it is open."""

    def __init__(self) -> None:
        self.count = 0
        self._before = triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = self._hook

    def _hook(self, *, repr: str, **rest: Any) -> None:
        self.count += 1
        _LOG.error("a kernel variant was compiled after loading: %s", repr)

    def close(self) -> None:
        triton.knobs.runtime.jit_post_compile_hook = self._before


class _Target:
    """What Triton asks of a driver while it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


def _compile(job: tuple[dict[str, str], int]) -> str:
    """Compile one variant and, where a GPU's libraries are, its launcher. Empty, or what went wrong."""
    variant, capability = job
    triton.runtime.driver.set_active(_Target(capability))
    try:
        function = getattr(importlib.import_module(variant["module"]), variant["name"].rpartition(".")[2])
        compiled = _compile_described(function, json.loads(variant["data"]))
        if Path("/dev/nvidia0").exists():
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(compiled.src, compiled.metadata)
    except Exception as error:  # any compiler failure is this variant's answer
        return f"{type(error).__name__}: {error}"[-900:]
    return ""


def main() -> None:
    """Child of ``compile_variants``: the order as JSON on stdin, a list of error texts as the last line of stdout."""
    order = json.load(sys.stdin)
    jobs = [(variant, order["capability"]) for variant in order["variants"]]
    for variant in order["variants"]:
        importlib.import_module(variant["module"])
    if order["workers"] > 1:
        with ProcessPoolExecutor(min(order["workers"], len(jobs)), multiprocessing.get_context("fork")) as pool:
            errors = list(pool.map(_compile, jobs))
    else:
        errors = [_compile(job) for job in jobs]
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
