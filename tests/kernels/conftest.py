"""Kernel tests run for real on a GPU, and in Triton's interpreter where there is none.

The switch must be set before ``triton`` is imported anywhere, so it stands here, above every test module.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
