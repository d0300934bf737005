"""What goes together in a recipe: which method makes which grids, and which layout holds them.

A setting without effect is an error, so is a result that no reader of the layout could load. Each rule raises
ValueError in words; pydantic turns it into the recipe's error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from calib.scheme import FIXED_GROUPS, Grid

#: Methods that search or weigh by data, and what belongs to them alone.
_SEARCHES = ("awq_lite", "awq")
_COMPENSATES = ("gptq", "awq")
_DYNAMIC_KINDS = ("token", "group")
#: Candidates of one search: each is a pass over the calibration text, or rounds every weight once more.
_MOST = 100
#: Tokens of ``choose`` text where a recipe says nothing.
CHOOSE_TOKENS = 2048
#: The narrowest range that is tried of a group's largest value: below it nearly every code is the largest one.
_NARROWEST = 0.1


class _Settings(Protocol):
    """What the rules read of a recipe."""

    @property
    def method(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def weight(self) -> Grid: ...
    @property
    def activation(self) -> Grid | None: ...
    @property
    def group_sizes(self) -> tuple[int, ...]: ...
    @property
    def alphas(self) -> tuple[float, ...]: ...
    @property
    def alpha_step(self) -> float | None: ...
    @property
    def clip_ratios(self) -> tuple[float, ...]: ...
    @property
    def damping(self) -> float | None: ...
    @property
    def act_order(self) -> str: ...
    @property
    def keep(self) -> tuple[str, ...]: ...
    @property
    def protect(self) -> int: ...
    @property
    def raised(self) -> Mapping[Any, tuple[str, ...]]: ...
    @property
    def lm_head(self) -> str | None: ...
    @property
    def choose_tokens(self) -> int: ...


def check_method(recipe: _Settings) -> None:
    """Settings that belong to a method, and the grids that it makes."""
    _check_belongings(recipe)
    weight, activation, method = recipe.weight, recipe.activation, recipe.method
    if (method == "none") != (not weight.quantized):
        raise ValueError(f"method {method!r} does not go with {weight} weights")
    if method == "none" and (activation or recipe.protect or recipe.keep or recipe.lm_head):
        raise ValueError("activation, keep, protect and lm_head have no effect when weights are not quantized")
    _check_raised(recipe)
    if weight.granularity.kind == "token":
        raise ValueError(f"weights {weight}: a weight has no tokens; scales are per tensor, channel, group or block")
    if method in ("max", "smooth") and not weight.symmetric:
        raise ValueError(f"weights {weight}: method {method!r} makes symmetric grids; zero points need awq or gptq")
    if weight.granularity.kind == "block" and (method != "max" or weight.dtype != "fp8_e4m3"):
        raise ValueError(f"weights {weight}: blocks are fp8 with method 'max'")
    if method in ("awq_lite", "awq", "gptq") and (weight.dtype != "int4" or weight.granularity.kind != "group"):
        raise ValueError(f"method {method!r} makes int4 weights in groups, not {weight}")
    if method == "awq_lite" and (activation is not None or not weight.symmetric):
        raise ValueError("method 'awq_lite' makes symmetric int4 weights with unquantized activations")
    _check_activation(method, weight, activation)
    grouped = activation is not None and activation.granularity.kind == "group"
    if recipe.protect and (weight.dtype in FIXED_GROUPS or not weight.symmetric or grouped):
        raise ValueError("protect measures layers on plain grids: no zero points, blocks or activations in groups")


def raises(weight: Grid, layout: str) -> tuple[str, ...]:
    """Eight-bit weights that may stand beside a recipe's own: beside int4, where the layout has a word for both."""
    if weight.dtype != "int4" or layout not in ("modelopt", "compressed-tensors"):
        return ()
    return ("int8",) if layout == "modelopt" else ("int8", "fp8")


def _check_raised(recipe: _Settings) -> None:
    allowed = raises(recipe.weight, recipe.layout)
    for name, patterns in recipe.raised.items():
        if recipe.weight.dtype != "int4":
            raise ValueError(f"raised lifts modules from int4 to eight bits, and {recipe.weight} weights are not int4; "
                             "keep leaves modules in 16 bits")
        if name not in allowed:
            what = f"can hold modules raised to {', '.join(allowed)}" if allowed else "has one grid for all modules"
            raise ValueError(f"raised to {name}: layout {recipe.layout!r} {what}; write compressed-tensors")
        if not patterns:
            raise ValueError(f"raised names no module for {name}")
    if recipe.raised and recipe.protect:
        raise ValueError("protect chooses layers by loss, raised names them: use keep beside raised")


def _check_belongings(recipe: _Settings) -> None:
    method = recipe.method
    _check_belonging("alphas", list(recipe.alphas), ("smooth",), method)
    if any(not 0.0 <= alpha <= 1.0 for alpha in recipe.alphas) or len(set(recipe.alphas)) != len(recipe.alphas):
        raise ValueError(f"alphas are distinct numbers from 0 to 1, like [0, 0.5, 0.7], not {list(recipe.alphas)}")
    _check_belonging("alpha_step", recipe.alpha_step, _SEARCHES, method)
    _check_search(recipe)
    _check_choice(recipe)
    unfit = any(not _NARROWEST <= ratio <= 1.0 for ratio in recipe.clip_ratios)
    if unfit or (recipe.clip_ratios and method not in (*_SEARCHES, "gptq")):
        raise ValueError("clip_ratios lie in [0.1, 1] and belong to methods 'awq_lite', 'awq' and 'gptq', not "
                         f"{list(recipe.clip_ratios)} with {method!r}")
    if (method == "gptq") > (recipe.damping is not None) or (recipe.damping is not None and method not in _COMPENSATES):
        raise ValueError("damping belongs to method 'gptq', which needs it, and to 'awq', which then rounds like gptq; "
                         f"here it is {recipe.damping} with {method!r}")
    if recipe.act_order != "none" and recipe.damping is None:
        raise ValueError(f"act_order {recipe.act_order!r} is the order in which 'gptq' (or 'awq' with damping) rounds "
                         f"columns; the method here is {method!r} without damping")
    if recipe.act_order == "groups" and method == "awq":
        raise ValueError("act_order 'groups' belongs to method 'gptq': awq finds the ranges of groups beforehand")
    if (recipe.weight.granularity.kind == "group") != bool(recipe.group_sizes):
        raise ValueError("group_sizes belong to group-wise weights, and they need them; here "
                         f"{list(recipe.group_sizes)} stand beside {recipe.weight} weights")
    for key, values in (("clip_ratios", recipe.clip_ratios), ("group_sizes", recipe.group_sizes)):
        if len(set(values)) != len(values):
            raise ValueError(f"{key} are distinct numbers, not {list(values)}: a second time changes nothing")


def _check_choice(recipe: _Settings) -> None:
    """``choose`` text is read where a choice is measured on it, whatever the KV cache."""
    if recipe.choose_tokens != CHOOSE_TOKENS and not recipe.protect and len(recipe.alphas) < 2:
        raise ValueError(f"choose_tokens {recipe.choose_tokens} has no effect: nothing is chosen by measured loss, "
                         "as several alphas and protect are")


def _check_search(recipe: _Settings) -> None:
    """A search ends within the day: no more candidates than any measurement could tell apart."""
    if recipe.alpha_step is not None and recipe.alpha_step < 1 / _MOST:
        raise ValueError(f"alpha_step {recipe.alpha_step:g} is a search of {1 / recipe.alpha_step:,.0f} candidates, "
                         f"each of which rounds the model anew; {1 / _MOST:g} is the finest")
    for key, values in (("alphas", recipe.alphas), ("clip_ratios", recipe.clip_ratios)):
        if len(values) > _MOST:
            raise ValueError(f"{key} holds {len(values):,} candidates, each of which rounds the model anew; at most "
                             f"{_MOST} are tried")


def _check_belonging(key: str, value: object, methods: tuple[str, ...], method: str) -> None:
    """A key that these methods need and no other takes."""
    names = " or ".join(map(repr, methods))
    if value and method not in methods:
        raise ValueError(f"{key} {value} only has a use in method {names}, and the method here is {method!r}")
    if not value and method in methods:
        raise ValueError(f"method {method!r} needs {key}, and there is none")


def _check_activation(method: str, weight: Grid, activation: Grid | None) -> None:
    if method == "smooth" and activation is None:
        raise ValueError("method 'smooth' needs quantized activations: without them it has nothing to move")
    if activation is None:
        return
    kind = activation.granularity.kind
    if not activation.quantized:
        raise ValueError(f"an activation that is not quantized is written as null, not as {activation}")
    if not activation.symmetric or activation.dynamic != (kind in _DYNAMIC_KINDS) or kind not in (
            "tensor", *_DYNAMIC_KINDS):
        raise ValueError(f"activations {activation}: they are symmetric, static per tensor, or dynamic per token or "
                         "group")
    if kind == "tensor" and (method in ("awq", "gptq") or weight.granularity.kind == "block"):
        raise ValueError("static activations come from methods 'max' and 'smooth'")
    if kind == "group" and weight.granularity.kind not in ("group", "block"):
        raise ValueError("activations in groups go with weights in groups or blocks")
    if kind == "group" and method == "max" and weight.granularity.kind == "group" and weight.dtype not in FIXED_GROUPS:
        raise ValueError("activations in groups beside grouped weights come from methods 'awq' and 'gptq'")


def check_layout(recipe: _Settings) -> None:
    """Only what a layout can hold, so that other runtimes read it."""
    weight, activation, layout, method = recipe.weight, recipe.activation, recipe.layout, recipe.method
    if (layout == "hf") != (method == "none"):
        raise ValueError(f"layout {layout!r} does not go with method {method!r}")
    if weight.dtype in FIXED_GROUPS:
        return
    if recipe.lm_head and layout != "compressed-tensors":
        raise ValueError(f"layout {layout!r} has no place for a quantized lm_head; write compressed-tensors")
    here = f"not for weight {weight} with activation {activation or '16-bit'}"
    fp8 = weight == Grid(dtype="fp8_e4m3") and activation == Grid(dtype="fp8_e4m3")
    if layout == "modelopt" and not (fp8 and method == "max") and method != "awq_lite":
        raise ValueError("layout 'modelopt' holds static per-tensor fp8 or awq_lite int4; write compressed-tensors")
    if layout != "modelopt" and method == "awq_lite":
        raise ValueError(f"awq_lite leaves a pre_quant_scale, which layout {layout!r} cannot hold")
    if layout == "awq" and (weight.symmetric or activation is not None or recipe.act_order == "groups"):
        raise ValueError("layout 'awq' holds asymmetric int4 groups in the order of the inputs, 16-bit activations, "
                         f"{here}, act_order {recipe.act_order!r}")
    if layout == "gptq" and (weight.dtype != "int4" or not weight.symmetric or activation is not None):
        raise ValueError(f"layout 'gptq' is written for symmetric int4 groups with 16-bit activations, {here}")
