"""Words that users choose from, apart from the records that use them: a command line is up before those are loaded."""

from __future__ import annotations

from typing import Literal, get_args

#: What a KV cache may be stored in, as people name it.
KvChoice = Literal["bf16", "fp8", "int8"]
KV_CHOICES: tuple[KvChoice, ...] = get_args(KvChoice)
