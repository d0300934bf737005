"""``sweep``: latency and throughput of an engine in process, of any OpenAI endpoint, or of several side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from calib.choices import KvChoice
from toolkit.options import KeptOption
from toolkit.session import Session, verb

if TYPE_CHECKING:
    from calib.progress import Report
    from evals.load_plan import LoadPlan
    from toolkit.loading import EndpointOptions
    from toolkit.stages import Workshop

_ENDPOINT = "Endpoints (--url or --plan)"
_near = partial(typer.Option, show_default=False)
_far = partial(typer.Option, show_default=False, rich_help_panel=_ENDPOINT)
_near_argument = typer.Argument(metavar="REF", show_default=False,
                                help="Engine, checkpoint or model; or give --url or --plan.")

RecipeOption = Annotated[str | None, _near(help="For a model: the recipe [default: bf16].")]
KvCacheOption = Annotated[KvChoice | None, _near(help="For a model: the KV cache's format.")]
CellsOption = Annotated[str | None, _near(
    help="batch x input x output tokens, comma-separated [default: 1x64x32,8x64x32].")]
UrlOption = Annotated[str | None, _far(help="Measure this OpenAI endpoint instead, like http://127.0.0.1:8000.")]
PlanOption = Annotated[Path | None, _far(help="A plan (YAML): loads, and the endpoints they meet side by side.")]
ModelOption = Annotated[str | None, _far(help="The model's name there.")]
TokenizerOption = Annotated[str | None, _far(help="REF whose tokens prompts are made of [default: MODEL].")]
PresetOption = Annotated[str | None, _far(
    help="Lengths: chat, rag, summarise, code, agent, tensorrt_llm, inferencex, cpu.")]
LengthsOption = Annotated[str | None, _far(help="Lengths: input x output tokens, like 512x64.")]
ConcurrencyOption = Annotated[str | None, _far(help="Closed loops: users, like 1,4,16.")]
RateOption = Annotated[str | None, _far(help="Open loops: requests a second, like 0.5,1,2.")]
RequestsOption = Annotated[int | None, _far(help="Requests of a run.")]
TraceOption = Annotated[Path | None, _far(help="Replay a trace (JSONL: timestamp, input_length, output_length).")]
SloOption = Annotated[str | None, _far(help="Service levels in ms, like ttft=500,tpot=50: gives goodput.")]
FindRateOption = Annotated[str | None, _far(
    help="Search the highest rate in this range that keeps --slo, like 0.5:20.")]
WarmupOption = Annotated[int, typer.Option(min=0, max=10_000, help="Rounds (requests of a load) thrown away.")]
RepeatsOption = Annotated[int, typer.Option(min=1, max=10_000, help="Rounds (runs of a load) measured.")]
SeedOption = Annotated[int, typer.Option(min=0)]
BurstinessOption = Annotated[float, typer.Option(help="Shape of the gaps: 1 Poisson, below burstier.",
                                                 rich_help_panel=_ENDPOINT)]
PromptsOption = Annotated[Literal["ids", "text"], typer.Option(help="Send token ids, or text.",
                                                               rich_help_panel=_ENDPOINT)]
EosOption = Annotated[bool, typer.Option("--ignore-eos/--no-ignore-eos", rich_help_panel=_ENDPOINT,
                                         help="Ask for exact output lengths (an extension).")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be measured.")]
KeyEnvOption = Annotated[str | None, _far("--api-key-env", help="Environment variable that holds the API key.")]


def register(app: typer.Typer) -> None:
    @verb(app, "sweep")
    def sweep(session: Session,
              ref: Annotated[str | None, _near_argument] = None, out: KeptOption = None,
              recipe: RecipeOption = None, kv_cache: KvCacheOption = None, cells: CellsOption = None,
              warmup: WarmupOption = 1, repeats: RepeatsOption = 3, seed: SeedOption = 0,
              url: UrlOption = None, plan: PlanOption = None, model: ModelOption = None,
              tokenizer: TokenizerOption = None, preset: PresetOption = None, lengths: LengthsOption = None,
              concurrency: ConcurrencyOption = None, rate: RateOption = None, burstiness: BurstinessOption = 1.0,
              requests: RequestsOption = None, trace: TraceOption = None, slo: SloOption = None,
              find_rate: FindRateOption = None, prompts: PromptsOption = "ids", ignore_eos: EosOption = True,
              key_env: KeyEnvOption = None, dry_run: DryRunOption = False) -> None:
        """Measure latency, throughput and memory.

        An engine: TTFT, TPOT and tokens/s over batch and length. An endpoint (vLLM, SGLang, TensorRT-LLM, ours, ...):
        closed and open loops, goodput, the highest rate under service levels. Warmed up, repeated, with spread.
        """
        from toolkit.loading import EndpointOptions

        _one_of(ref, url, plan)
        remote = {"--model": model, "--tokenizer": tokenizer, "--preset": preset, "--lengths": lengths, "--rate": rate,
                  "--concurrency": concurrency, "--requests": requests, "--trace": trace, "--slo": slo,
                  "--find-rate": find_rate}
        local = {"--recipe": recipe, "--kv-cache": kv_cache, "--cells": cells}
        _refuse("REF" if ref else "--plan" if plan else "--url",
                {**(remote | {"--api-key-env": key_env} if ref else local), **(remote if plan else {})})
        if ref is not None:
            _engine(session, ref, out, recipe, kv_cache, cells or "1x64x32,8x64x32", warmup, repeats, seed, dry_run)
        elif plan is not None:
            _plan(session, plan, out, key_env, dry_run)
        else:
            options = EndpointOptions(url or "", _named(model), tokenizer or _named(model), preset, lengths,
                                      concurrency, "1" if find_rate else rate, burstiness, requests, trace, slo,
                                      prompts, ignore_eos, warmup, repeats, seed)
            _endpoint(session, options, out, key_env, find_rate, dry_run)


def _one_of(*places: object) -> None:
    from toolkit.errors import UsageError

    if sum(place is not None for place in places) != 1:
        raise UsageError("what is to be measured?", "Give one of REF, --url and --plan.")


def _refuse(what: str, foreign: Mapping[str, object]) -> None:
    """UsageError for an option that would have no effect on what is measured."""
    from toolkit.errors import UsageError

    if given := [name for name, value in foreign.items() if value is not None]:
        raise UsageError(f"{given[0]} does not go with {what}", "See `toolkit sweep --help`.")


def _named(model: str | None) -> str:
    from toolkit.errors import UsageError

    if model is None:
        raise UsageError("--url needs --model", "Give the name under which the endpoint serves it.")
    return model


def _plan(session: Session, path: Path, out: Path | None, key_env: str | None, dry_run: bool) -> None:
    from evals.load_plan import load_plan

    _endpoints(session, load_plan(path), path.absolute().parent, out, key_env, None, dry_run)


def _endpoint(session: Session, options: EndpointOptions, out: Path | None, key_env: str | None,
              find_rate: str | None, dry_run: bool) -> None:
    from toolkit.loading import plan_of

    _endpoints(session, plan_of(options), Path(), out, key_env, find_rate, dry_run)


def _engine(session: Session, ref: str, out: Path | None, recipe: str | None, kv_cache: Any, cells: str, warmup: int,
            repeats: int, seed: int, dry_run: bool) -> None:
    from calib.artifact import Artifact
    from engines.llm import LLM
    from evals.latency import sweep as measure
    from toolkit import stages
    from toolkit.job import EngineJob, Sweep
    from toolkit.making import engine_of
    from toolkit.options import check_cells, parse_cells
    from toolkit.report.judged import sweep_table
    from toolkit.store import RunStore

    settings = Sweep(cells=parse_cells(cells), warmup=warmup, repeats=repeats)
    if dry_run:
        session.show(settings.model_dump(mode="json"), cells.split(","), f"{len(settings.cells)} cells, {warmup} + "
                     f"{repeats} rounds each: {cells}; nothing was measured")
        return
    wanted = EngineJob(recipe=recipe or "bf16", kv_cache=kv_cache or "bf16") if recipe or kv_cache else None
    with RunStore(session.home.store) as store, session.watch() as watch:
        shop = stages.Workshop(session.home, store, watch, session.offline)
        engine = engine_of(shop, ref, wanted)
        check_cells(settings.cells, engine.plan.limits)
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


def _endpoints(session: Session, plan: Any, folder: Path, out: Path | None, key_env: str | None, find_rate: str | None,
               dry_run: bool) -> None:
    from toolkit import loading, stages
    from toolkit.errors import UsageError
    from toolkit.report.loads import plan_table, side_by_side
    from toolkit.store import RunStore

    if key_env is not None and key_env not in os.environ:
        raise UsageError(f"there is no environment variable {key_env}", "Set it to the API key.")
    bounds = None if find_rate is None else loading.bounds_of(find_rate)
    if dry_run:
        session.show({"plan": plan.model_dump(mode="json"), "cells": [point.name for point in plan.points()]},
                     [point.name for point in plan.points()], *plan_table(plan))
        return
    key = os.environ[key_env] if key_env else None
    with RunStore(session.home.store) as store, session.watch() as watch:
        shop = stages.Workshop(session.home, store, watch, session.offline)
        if bounds is not None:
            _search(session, shop, plan, bounds, key, watch)
            return
        done = loading.run_plan(shop, plan, folder, out, key)
    dead = loading.unmeasured([sweep for sweep, _ in done])
    session.show({"sweeps": [{"digest": artifact.digest, "path": str(artifact.path), **sweep.model_dump(mode="json")}
                             for sweep, artifact in done], "unmeasured": dead},
                 [artifact.digest for _, artifact in done], *side_by_side(plan, [sweep for sweep, _ in done]),
                 *[f"{artifact.path}" for _, artifact in done],
                 *([f"nothing of {', '.join(dead)} may be used; the same command measures that again"] if dead else []))
    if dead:
        raise typer.Exit(3)


def _search(session: Session, shop: Workshop, plan: LoadPlan, bounds: tuple[float, float], key: str | None,
            watch: Report) -> None:
    """The highest rate. Where no load gave a figure, nothing was found out about the endpoint: exit 3."""
    from evals.load_sweep import find_rate
    from toolkit import loading
    from toolkit.report.loads import search_parts

    rate, tried = find_rate(plan, plan.targets[0], loading.tokenizer_of(shop, plan.tokenizer),
                            bounds, key=key, report=watch)
    session.show({"rate": rate, "tried": [{"rate": offered, **cell.model_dump(mode="json")}
                                          for offered, cell in tried]}, [f"{rate}"], *search_parts(rate, tried))
    if all(cell.invalid for _, cell in tried):
        raise typer.Exit(3)
