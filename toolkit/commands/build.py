"""``build``: a checkpoint becomes an engine for this device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from toolkit.options import KvOption, MemoryOption, OutOption, RefArgument
from toolkit.session import Session, verb

if TYPE_CHECKING:
    from engines.build.builder import Described
    from engines.build.prepare import Prepared


def register(app: typer.Typer) -> None:
    @verb(app, "build")
    def build(session: Session, ref: RefArgument, out: OutOption,
              recipe: Annotated[str | None, typer.Option(help="For a model: the recipe to calibrate with "
                                                         "[default: bf16].", show_default=False)] = None,
              kv_cache: KvOption = "bf16",
              device: Annotated[str | None, typer.Option(help="Device to build for [default: cpu].",
                                                         show_default=False)] = None,
              target: Annotated[str | None, typer.Option(show_default=False, help="Prepare for a device that is not "
                                                         "here (cpu, sm_90, ...): weights are packed now, kernels "
                                                         "are tuned when it is first opened there.")] = None,
              max_seq_len: Annotated[int | None, typer.Option(min=2, help="Prompt and output tokens of a sequence "
                                                              "[default: the model's].", show_default=False)] = None,
              max_batch_size: Annotated[int, typer.Option(min=1, help="Sequences in one step.")] = 16,
              max_num_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one step.")] = 2048,
              memory: MemoryOption = None,
              tune: Annotated[Literal["none", "quick", "full"], typer.Option(help="How long operators are timed.")
                              ] = "quick",
              deterministic: Annotated[bool, typer.Option("--deterministic", help="Bitwise row-invariant operators "
                                                          "only.")] = False) -> None:
        """Build an engine for this device.

        From a checkpoint, or from a model, which is calibrated first.
        """
        from engines.build.builder import build as build_engine
        from engines.build.builder import foresee
        from engines.build.prepare import foresee as prepare_foresee
        from engines.build.prepare import prepare
        from engines.device import detect
        from engines.plan import EngineSpec
        from toolkit import making
        from toolkit.errors import UsageError
        from toolkit.job import EngineJob
        from toolkit.options import parse_memory
        from toolkit.refs import resolve
        from toolkit.stages import Workshop
        from toolkit.store import RunStore

        if target is not None and device is not None:
            raise UsageError(f"--device {device} beside --target {target}", "Leave --device out: the target says it.")

        def all_memory() -> int:
            if target is not None:
                raise UsageError(f"--memory {memory} is a share of a device that is not here", "Give it in bytes.")
            return detect(device or "cpu").memory_bytes
        cap = parse_memory(memory, all_memory) if memory else None
        spec = EngineSpec(device=device or "cpu", max_seq_len=max_seq_len, max_batch_size=max_batch_size,
                          max_num_tokens=max_num_tokens, memory=cap, tune=tune, deterministic=deterministic)

        def check(checkpoint: Described) -> None:
            foresee(checkpoint, spec) if target is None else prepare_foresee(checkpoint, spec, target)
        with RunStore(session.home.store) as store, session.watch() as watch:
            shop = Workshop(session.home, store, watch, session.offline)
            found = resolve(ref, session.home, store, offline=session.offline).of_kind("model", "quantized-checkpoint")
            if found.kind == "quantized-checkpoint" and (recipe is not None or kv_cache != "bf16"):
                raise UsageError(f"{ref} is a checkpoint: its recipe is fixed", "Leave --recipe and --kv-cache out.")
            source = making.checkpoint_of(shop, found, EngineJob(recipe=recipe or "bf16", kv_cache=kv_cache), check)
            if target is not None:
                prepared = prepare(source, spec, target, out, watch)
                store.remember(prepared.artifact)
                _show_prepared(session, prepared)
                return
            made = build_engine(source, spec, out, watch, tuning=session.home.path / "tuning")
            store.remember(made.artifact)
        limits = made.plan.limits
        session.show({"digest": made.digest, "path": str(made.path), "recipe": made.recipe, "device": made.device,
                      "emulated": made.emulated, "size_bytes": made.size_bytes,
                      "limits": limits.model_dump(mode="json")}, [made.digest],
                     f"{made.path}  {made.recipe} for {made.device}, {made.size_bytes / 1e6:,.0f} MB, up to "
                     f"{limits.max_batch_size} sequences of {limits.max_seq_len} tokens", made.digest,
                     f"next: toolkit eval {out} --baseline MODEL, toolkit sweep {out}, or toolkit serve {out}")


def _show_prepared(session: Session, made: Prepared) -> None:
    artifact, record = made.artifact, made.record
    session.show({"digest": artifact.digest, "path": str(artifact.path), "recipe": record.recipe,
                  "target": record.target, "size_bytes": artifact.size_bytes}, [artifact.digest],
                 f"{artifact.path}  {record.recipe} prepared for {record.target}, {artifact.size_bytes / 1e6:,.0f} MB; "
                 "its kernels are tuned when it is first opened there", artifact.digest,
                 f"next: toolkit pack {artifact.path} -o FILE, and there toolkit generate FILE -p TEXT")
