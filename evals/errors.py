"""What can go wrong when judging. A judgement that cannot be trusted is an error here, never a silent average."""

from __future__ import annotations

from calib.errors import ENVIRONMENT, USAGE, ToolkitError


class EvalError(ToolkitError):
    """A judgement cannot be made, or came out in a way that must not be averaged."""

    code = "evaluation"


class DataError(EvalError):
    """Evaluation data that must not be used: empty, duplicated, changed, unlisted, or overlapping."""

    code = "evaluation_data"


class DataMissingError(DataError):
    """The prepared folder, or a file of it, is not there."""

    code = "evaluation_data_missing"
    exit_code = ENVIRONMENT


class ComparisonError(EvalError):
    """Two reports that may not be compared: other prompts, template, tokenizer, harness or data."""

    code = "not_comparable"


class PolicyError(EvalError):
    """A gate policy that cannot be read or asks for what no statistics can give."""

    code = "policy"


class MeasureError(EvalError):
    """A latency or memory measurement that failed."""

    code = "measurement"
    exit_code = ENVIRONMENT


class LoadError(MeasureError):
    """A load, a plan of loads or an address that cannot be measured as it is written: nothing was sent."""

    code = "load"
    exit_code = USAGE
