"""``serve``: an engine behind OpenAI's API and the KServe v2 protocol."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calib.choices import KvChoice
from toolkit.options import LONGEST_S, MOST_QUEUED, LengthOption, RefArgument
from toolkit.session import Session, verb

if TYPE_CHECKING:
    from toolkit.job import EngineJob, Limits
    from toolkit.store import RunStore


def register(app: typer.Typer) -> None:
    @verb(app, "serve")
    def serve(session: Session, ref: RefArgument,
              host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs --api-keys.")
                              ] = "127.0.0.1",
              port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
              model_id: Annotated[str | None, typer.Option("--model-id", help="The model's name in requests "
                                                           "[default: from REF].", show_default=False)] = None,
              recipe: Annotated[str | None, typer.Option(help="For a model: the recipe to calibrate with "
                                                         "[default: bf16].", show_default=False)] = None,
              kv_cache: Annotated[KvChoice | None, typer.Option(help="For a model: the KV cache's format "
                                                               "[default: bf16].", show_default=False)] = None,
              max_seq_len: LengthOption = None,
              api_keys: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, show_default=False,
                                                            help="File of callers, one name:secret a line.")] = None,
              allow_host: Annotated[list[str] | None, typer.Option(help="A further name in Host headers; * for any.",
                                                                   show_default=False)] = None,
              max_queue: Annotated[int, typer.Option(min=0, max=MOST_QUEUED, help="Prompts that may wait; then 429.")
                                   ] = 256,
              request_timeout: Annotated[float, typer.Option(min=0.1, max=LONGEST_S, help="Seconds for one request.")
                                         ] = 600.0,
              drain: Annotated[float, typer.Option(min=0.0, max=LONGEST_S,
                                                     help="Seconds for requests under way after SIGTERM.")] = 30.0,
              watchdog: Annotated[float, typer.Option(min=0.1, max=LONGEST_S, help="Seconds without a step; then 503.")
                                  ] = 60.0) -> None:
        """Serve an engine over HTTP until SIGTERM, which lets requests under way finish."""
        import asyncio
        import logging
        import sys

        from toolkit.job import EngineJob, Limits
        from toolkit.refs import resolve
        from toolkit.serve.options import ServeOptions, read_keys
        from toolkit.serve.server import serve as run
        from toolkit.serve.turns import new_loop
        from toolkit.store import RunStore

        logging.basicConfig(level=logging.INFO, stream=sys.stderr,
                            format="%(asctime)s server %(levelname)s %(message)s")
        wanted = EngineJob(recipe=recipe or "bf16", kv_cache=kv_cache or "bf16") if recipe or kv_cache else None
        limits = None if max_seq_len is None else Limits(max_seq_len=max_seq_len)
        with RunStore(session.home.store) as store:
            found = resolve(ref, session.home, store, offline=session.offline)
            made = found.kind == "engine" and wanted is None and limits is None
            engine = found.path if made else _made(session, store, ref, wanted, limits)
        options = ServeOptions(
            host=host, port=port, model=model_id or _model_id(ref), keys=read_keys(api_keys) if api_keys else (),
            allowed_hosts=tuple(allow_host or ()), max_queue=max_queue, request_timeout_s=request_timeout,
            drain_s=drain, watchdog_s=watchdog)

        def on_ready(taken: int, info: dict[str, Any]) -> None:
            shown = f"[{host}]" if ":" in host else host
            url = f"http://{shown}:{taken}"
            session.show({"url": url, "model": options.model, "engine": info["digest"], "device": info["device"],
                          "limits": info["limits"]}, [url],
                         f"{options.model} ({info['recipe']}, kv {info['kv_cache']}, {info['device']}) at {url}/v1")
            sys.stdout.flush()
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(run(engine, options, on_ready))


def _made(session: Session, store: RunStore, ref: str, wanted: EngineJob | None, limits: Limits | None) -> Path:
    """The engine that is made of a model or checkpoint, once."""
    from toolkit.making import engine_of
    from toolkit.stages import Workshop

    with session.watch() as watch:
        return engine_of(Workshop(session.home, store, watch, session.offline), ref, wanted, limits).path


def _model_id(ref: str) -> str:
    """A name without slashes, from what the user called it."""
    name = ref.removeprefix("alias:").rstrip("/").rpartition("/")[2]
    return "".join(char if char.isalnum() or char in "._-" else "-" for char in name) or "model"
