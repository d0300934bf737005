"""Fixtures of this room; the helpers behind them are in ``tiny_llamas`` so that tests can import them by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tiny_llamas import calibration, choose, demo_model, model_folder  # noqa: F401
