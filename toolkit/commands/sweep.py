"""``sweep``: latency, throughput and memory of an engine."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.options import KeptOption, KvCache, RefArgument
from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    @verb(app, "sweep")
    def sweep(session: Session, ref: RefArgument, out: KeptOption = None,
              recipe: Annotated[str | None, typer.Option(help="For a model: the recipe [default: bf16].",
                                                         show_default=False)] = None,
              kv_cache: Annotated[KvCache | None, typer.Option(help="For a model: the KV cache's format.",
                                                               show_default=False)] = None,
              cells: Annotated[str, typer.Option(help="batch x input x output tokens, comma-separated.")] =
              "1x64x32,8x64x32",
              warmup: Annotated[int, typer.Option(min=0, help="Rounds thrown away.")] = 1,
              repeats: Annotated[int, typer.Option(min=1, help="Rounds measured.")] = 3,
              seed: Annotated[int, typer.Option(min=0)] = 0) -> None:
        """Measure latency, throughput and memory.

        TTFT, TPOT and tokens/s over batch and length: warmed up, repeated, with spread.
        """
        from calib.artifact import Artifact
        from engines.llm import LLM
        from evals.latency import sweep as measure
        from toolkit import stages
        from toolkit.job import EngineJob, Sweep
        from toolkit.making import engine_of
        from toolkit.options import parse_cells
        from toolkit.report.judged import sweep_table
        from toolkit.store import RunStore

        settings = Sweep(cells=parse_cells(cells), warmup=warmup, repeats=repeats)
        wanted = EngineJob(recipe=recipe or "bf16", kv_cache=kv_cache or "bf16") if recipe or kv_cache else None
        with RunStore(session.home.store) as store, session.watch() as watch:
            shop = stages.Workshop(session.home, store, watch, session.offline)
            engine = engine_of(shop, ref, wanted)
            if out is None:
                found, artifact = stages.latency(shop, engine, settings, seed, engine.recipe)
            else:
                with LLM(engine) as llm:
                    found = measure(llm, stages.target_of(llm, engine.recipe), settings.cells, device=engine.device,
                                    warmup=warmup, repeats=repeats, seed=seed, out=out, engine=engine.path,
                                    max_batch_size=engine.plan.limits.max_batch_size, report=watch)
                artifact = Artifact.open(out)
                store.remember(artifact)
        session.show({"digest": artifact.digest, "path": str(artifact.path), **found.model_dump(mode="json")},
                     [artifact.digest], sweep_table(found), f"{artifact.path}")
