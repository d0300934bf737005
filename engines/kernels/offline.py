"""Compiles kernels for a GPU that is not here, and says what came out.

Triton's compiler needs no device: source -> TTIR -> TTGIR -> LLVM -> PTX -> cubin all run on a CPU (``ptxas`` and
``cuobjdump`` come with the package). So registers, shared memory, spills and opcodes of every kernel can be asserted
in CI and read while developing, at about a second a variant.

What to look for on Hopper:

* ``LDG.E.128`` is a 16-byte global load; ``LDG.E.64`` in a hot loop means that alignment could not be proven (pass
  ``k // 8`` in instead of computing it inside) or that the layout gives a thread fewer bytes.
* ``HGMMA`` / ``QGMMA`` / ``IGMMA`` are the warpgroup matrix instructions for 16-bit / fp8 / int8; plain ``HMMA`` is
  the older, slower path. ``UTMALDG`` is a bulk tensor copy (TMA), ``LDGSTS`` a cp.async copy.
* ``STL`` / ``LDL`` are register spills to local memory. ``ACQBULK`` and ``PREEXIT`` are PDL's wait and launch.

``compile_only`` turns launches into compilations: the same launcher code, called with CPU tensors, fills Triton's disk
cache in as many processes as there are cores, and no GPU is touched until the real launches find everything there.

``compile_for`` works in this process. Under ``TRITON_INTERPRET=1`` jit functions are interpreted and cannot be
compiled, so ``compile_jobs`` runs the same in a child process without that variable; tests use it.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines.kernels.sass import Instruction, instructions, overwritten

#: What ``KernelFacts.order`` tells: a letter for mnemonics that begin so.
_ORDER = {"LDG": "L", "STG": "S", "BAR": "B", "ACQBULK": "W", "HGMMA": "M", "QGMMA": "M", "IGMMA": "M", "HMMA": "M",
          "IMMA": "M"}
_USAGE = re.compile(r"REG:(\d+)\s+STACK:(\d+)")


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What one compiled variant costs. ``registers`` per thread; ``stack`` and ``shared`` in bytes per thread / CTA.

    ``order``: how reads of memory (L), stores (S), barriers (B), matrix instructions (M) and PDL's wait (W) follow each
    other in the code. A read at the end of a kernel is waited for by everybody and hidden by nothing.
    ``overwritten``: what writes registers that a product still reads (``sass``); such a kernel's sums may be wrong.
    """

    name: str
    capability: int
    registers: int
    stack: int
    shared: int
    opcodes: Mapping[str, int]
    order: str
    overwritten: Sequence[str] = ()

    def count(self, prefix: str) -> int:
        """Instructions whose mnemonic is ``prefix`` or begins with ``prefix.`` (``LDG.E.128`` finds its modifiers)."""
        return sum(n for op, n in self.opcodes.items() if op == prefix or op.startswith(prefix + "."))

    @property
    def spills(self) -> int:
        """Local-memory loads and stores in the code; 0 in a hot kernel."""
        return self.count("STL") + self.count("LDL")


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One variant to compile. ``module`` and ``fn`` name a ``@triton.jit`` function; the rest is ``compile_for``'s."""

    module: str
    fn: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    capability: int = 90
    aligned: Sequence[str] = ()
    num_warps: int = 4
    num_stages: int = 1
    pdl: bool = False
    registers: int = 0

    @classmethod
    def of(cls, kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], **options: Any) -> CompileJob:
        """The job for a jit function, compiled or interpreted."""
        python = kernel.fn
        return cls(python.__module__, python.__name__, signature, constexprs, **options)


def compile_for(fn: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], capability: int = 90, *,
                aligned: Iterable[str] = (), num_warps: int = 4, num_stages: int = 1, pdl: bool = False,
                registers: int = 0) -> KernelFacts:
    """Compile a Triton or Gluon jit function for ``capability`` (80, 89, 90, 100, ...) and read the cubin.

    ``signature`` types the run-time arguments (``*bf16``, ``*fp8e4nv``, ``i32``, ``tensordesc<bf16[64,128]>``);
    arguments named in ``constexprs`` are constants. Pointers count as 16-byte aligned, as torch's are; integers only
    when named in ``aligned``, which is what a launch with a multiple of 16 proves. ``registers``: most per thread.
    Raises whatever Triton raises when the target cannot run the kernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    wanted = set(aligned)
    unknown = (set(signature) | set(constexprs) | wanted) ^ set(fn.arg_names)
    if unknown:
        raise ValueError(f"{fn.__name__}: arguments do not match the kernel: {sorted(unknown)}")
    types = {name: "constexpr" if name in constexprs else signature[name] for name in fn.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names)
             if types[name].startswith("*") or name in wanted}
    dialect = GluonASTSource if fn.is_gluon() else ASTSource
    source = dialect(fn, types, dict(constexprs), attrs)
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    if pdl:
        options["launch_pdl"] = True
    if registers:
        options["maxnreg"] = registers
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack, code = _read_cubin(compiled.asm["cubin"])
    opcodes = [one.op for one in code]
    order = "".join(_ORDER.get(op.partition(".")[0], "") for op in opcodes)
    return KernelFacts(fn.__name__, capability, registers, stack, int(compiled.metadata.shared), dict(Counter(opcodes)),
                       order, overwritten(code))


def _read_cubin(cubin: bytes) -> tuple[int, int, list[Instruction]]:
    """Registers, stack, and the code."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = [subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
                for flag in ("-res-usage", "-sass")]
    usage = _USAGE.search(dump[0])
    if usage is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {dump[0][:200]!r}")
    return int(usage[1]), int(usage[2]), instructions(dump[1])


class _AbsentDevice:
    """What Triton asks its driver while compiling, answered for a device that is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self.capability, 10)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def compile_only(capability: int, *, launchers: bool = False) -> Iterator[list[Any]]:
    """Inside, ``kernel[grid](...)`` compiles for ``capability`` and launches nothing; yields what was compiled.

    Arguments may be CPU tensors: types, divisibility by 16 and alignment are what counts. ``launchers`` also builds the
    C stub of each signature, which needs the CUDA driver library (on a machine with a GPU). Not for threads: Triton's
    driver is exchanged, and jit functions remember the device they compiled for: start one process a core for it.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    before, run = driver._active, JITFunction.run  # asking for .active fails without a device
    compiled: list[Any] = []

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if launchers:
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(kernel.src, kernel.metadata)
        compiled.append(kernel)
        return kernel

    driver.set_active(_AbsentDevice(capability))
    JITFunction.run = compile_instead
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver.set_active(before)


def compile_job(job: CompileJob) -> KernelFacts:
    """``compile_for`` by name."""
    fn = getattr(importlib.import_module(job.module), job.fn)
    return compile_for(fn, job.signature, job.constexprs, job.capability, aligned=job.aligned,
                       num_warps=job.num_warps, num_stages=job.num_stages, pdl=job.pdl,
                       registers=job.registers)


def compile_jobs(jobs: Sequence[CompileJob], workers: int = 1) -> list[KernelFacts | str]:
    """Compile in a child process that does not interpret; a variant that fails gives its error text instead.

    The list has the order of ``jobs``. Raises RuntimeError when the child itself dies.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [environment.get("PYTHONPATH")])])
    text = json.dumps({"workers": workers, "jobs": [asdict(job) for job in jobs]})
    done = subprocess.run([sys.executable, "-m", "engines.kernels.offline"], input=text, capture_output=True,
                          text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"the compile process ended with {done.returncode}: {done.stderr[-2000:]}")
    return [answer if isinstance(answer, str) else KernelFacts(**answer)
            for answer in json.loads(done.stdout.splitlines()[-1])]


def _attempt(job: CompileJob) -> dict[str, Any] | str:
    try:
        return asdict(compile_job(job))
    except Exception as error:  # any compiler failure is this variant's answer
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Child of ``compile_jobs``: jobs as JSON on stdin, facts as the last line of stdout."""
    order = json.load(sys.stdin)
    jobs = [CompileJob(**job) for job in order["jobs"]]
    if order["workers"] > 1:
        with ProcessPoolExecutor(order["workers"]) as pool:
            answers = list(pool.map(_attempt, jobs))
    else:
        answers = [_attempt(job) for job in jobs]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
