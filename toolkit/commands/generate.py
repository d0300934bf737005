"""``generate``: tokens from an engine, streamed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from calib.choices import KvChoice
from toolkit.options import LengthOption, RefArgument
from toolkit.session import Session, verb


def register(app: typer.Typer) -> None:
    @verb(app, "generate")
    def generate(session: Session, ref: RefArgument,
                 prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to continue.", show_default=False)],
                 recipe: Annotated[str | None, typer.Option(help="For a model: the recipe to calibrate with "
                                                            "[default: bf16].", show_default=False)] = None,
                 kv_cache: Annotated[KvChoice | None, typer.Option(help="For a model: the KV cache's format "
                                                                  "[default: bf16].", show_default=False)] = None,
                 max_seq_len: LengthOption = None,
                 chat: Annotated[bool, typer.Option("--chat", help="Ask through the model's chat template.")] = False,
                 max_tokens: Annotated[int, typer.Option(min=1, help="Tokens at most.")] = 128,
                 temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
                 top_k: Annotated[int, typer.Option(min=0, help="0 keeps every token.")] = 0,
                 top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
                 seed: Annotated[int | None, typer.Option(min=0, show_default=False)] = None,
                 stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.",
                                                                show_default=False)] = None) -> None:
        """Continue a text, or answer it with --chat. Tokens are printed as they come."""
        from engines.llm import LLM, failure
        from engines.request import SamplingParams
        from toolkit.errors import UsageError
        from toolkit.job import EngineJob, Limits
        from toolkit.making import engine_of
        from toolkit.stages import Workshop
        from toolkit.store import RunStore

        idle = [option for option, given in (("--top-k", top_k > 0), ("--top-p", top_p != 1.0),
                                             ("--seed", seed is not None)) if given and temperature == 0.0]
        if idle:
            raise UsageError(f"{idle[0]} has no effect at temperature 0, which always takes the likeliest token",
                             "Give --temperature, like 0.7, or leave it out.")
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
                                stop=tuple(stop or ()))
        wanted = EngineJob(recipe=recipe or "bf16", kv_cache=kv_cache or "bf16") if recipe or kv_cache else None
        limits = None if max_seq_len is None else Limits(max_seq_len=max_seq_len)
        with RunStore(session.home.store) as store, session.watch() as watch:
            engine = engine_of(Workshop(session.home, store, watch, session.offline), ref, wanted, limits)
        with LLM(engine) as llm:
            ids = llm.tokenizer.chat([{"role": "user", "content": prompt}]) if chat else llm.tokenizer.encode(prompt)
            if session.as_json or session.quiet:
                [output] = llm.generate([ids], params)
                done = output.outputs[0]
                session.show({"engine": engine.digest, "prompt_token_ids": ids, "text": done.text,
                              "token_ids": done.token_ids, "finish_reason": done.finish_reason}, [done.text])
                return
            failed: str | None = None
            for delta in llm.stream(ids, params):
                sys.stdout.write(delta.outputs[0].text)
                sys.stdout.flush()
                failed = failed or delta.outputs[0].error
        sys.stdout.write("\n")
        if failed is not None:
            raise failure(failed)
