"""Does it still speak? Short greedy continuations, judged only for what no working model does.

A broken engine often keeps a plausible average and prints nothing, or one token for ever. A small healthy model also
repeats itself when decoded greedily, sentence by sentence; so a loop means here that the last 16 tokens or more hold at
most two different tokens, and it is a fault only where the baseline, continuing the same text, does not do it.
"""

from __future__ import annotations

from collections.abc import Sequence

from calib.text import Tokenizer
from engines.request import SamplingParams
from evals.errors import EvalError
from evals.items import Text
from evals.journal import Journal
from evals.report import Sample
from evals.target import Generator

LOOP_TOKENS = 16
PROMPT_TOKENS = 32


def looping(token_ids: Sequence[int]) -> bool:
    """The last ``LOOP_TOKENS`` tokens hold at most two different ones."""
    return len(token_ids) >= LOOP_TOKENS and len(set(token_ids[-LOOP_TOKENS:])) <= 2


def take_samples(generator: Generator, tokenizer: Tokenizer, texts: Sequence[Text], tokens: int, journal: Journal
                 ) -> list[Sample]:
    """Continue the first 32 tokens of each text greedily by at most ``tokens`` tokens; done ones are in ``journal``."""
    waiting = [text for text in texts if text.id not in journal.done]
    prompts = [tokenizer.encode(text.text)[:PROMPT_TOKENS] for text in waiting]
    outputs = generator.generate(prompts, SamplingParams(max_tokens=tokens)) if prompts else []
    if len(outputs) != len(prompts):
        raise EvalError(f"{len(prompts)} prompts were continued and {len(outputs)} outputs came back",
                        "The generator dropped requests.")
    if waiting:
        journal.add({text.id: {"prompt": tokenizer.decode(prompt), "text": output.outputs[0].text,
                               "token_ids": list(output.outputs[0].token_ids)}
                     for text, prompt, output in zip(waiting, prompts, outputs, strict=True)})
    return [Sample(id=text.id, **journal.done[text.id]) for text in texts]


def sample_faults(samples: Sequence[Sample], baseline: Sequence[Sample] = ()) -> list[str]:
    """Faults of continuations: empty (no text at all) or looping, where the baseline's of the same text is not."""
    spoken = {sample.id: sample for sample in baseline}
    faults = []
    for sample in samples:
        other = spoken.get(sample.id)
        if not sample.text.strip() and not (other is not None and not other.text.strip()):
            faults.append(f"text {sample.id[:12]}: the continuation is empty ({len(sample.token_ids)} tokens)")
        elif looping(sample.token_ids) and not (other is not None and looping(other.token_ids)):
            faults.append(f"text {sample.id[:12]}: the continuation loops: ...{sample.text[-40:]!r}")
    return faults
