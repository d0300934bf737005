"""One layer rounded at a time: the figures are those of rounding by hand, and a spoiled layer stands out."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from calib.errors import ArtifactError, CalibError
from calib.grids import fake_quantize
from calib.model import load_hf
from calib.plan import make_plan
from calib.recipe import load_recipe
from calib.scheme import Grid, Scheme
from calib.sensitivity import measure, open_sensitivity, sqnr_db
from calib.sensitivity_probe import round_input, round_weight

FORMATS = ("fp8", "int8", "int4_awq")


@pytest.fixture(scope="module")
def found(model_folder, choose, tmp_path_factory):
    return measure(model_folder, choose, tmp_path_factory.mktemp("sensitivity") / "out", rows=2, length=48)


def by_hand(folder, tokens, layer, form):
    """NLL per token with the linears of one layer rounded, through the whole model."""
    schemes = make_plan(folder, load_recipe(form)).schemes
    model = load_hf(folder)
    tops = {}
    hooks = [model.get_submodule(name).register_forward_pre_hook(
        lambda _, args, name=name: tops.__setitem__(name, args[0].abs().amax())) for name in schemes]
    total = 0.0
    for row in tokens:
        with torch.inference_mode():
            plain = model(input_ids=row[None]).logits[0]
            base = torch.nn.functional.cross_entropy(plain[:-1], row[1:], reduction="sum")
        rounded = load_hf(folder)
        for name, scheme in schemes.items():
            if f".{layer}." in name:
                module, top = rounded.get_submodule(name), tops[name].clone()
                module.weight.data = round_weight(scheme.weight, module.weight.data)
                module.register_forward_pre_hook(
                    lambda _, args, scheme=scheme, top=top: (round_input(scheme, args[0], top),))
        with torch.inference_mode():
            logits = rounded(input_ids=row[None]).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits[:-1], row[1:], reduction="sum") - base)
    for hook in hooks:
        hook.remove()
    return total / (tokens.numel() - len(tokens))


def test_every_layer_and_linear_has_its_figures(found, model_folder):
    layers = load_hf(model_folder).config.num_hidden_layers
    assert (found.layers, found.formats) == (layers, FORMATS)
    assert len(found.losses) == layers * 3
    assert len(found.modules) == layers * 7 * 3
    assert found.tokens == 2 * 47
    assert all(loss.kl >= 0 and 0 < loss.sqnr_db < 80 for loss in found.losses)
    assert [fact.parameters for fact in found.facts] == [64 * (64 + 32 + 32 + 64) + 3 * 64 * 128] * layers
    assert all(fact.amax > 0 for fact in found.facts)
    mean = {form: sum(noise.sqnr_db for noise in found.modules if noise.format == form) / (7 * layers)
            for form in FORMATS}
    assert mean["int8"] > mean["fp8"] > mean["int4_awq"]
    assert 10 < mean["int4_awq"] < 30
    assert 35 < mean["int8"] < 55


def test_losses_are_those_of_the_whole_model_with_one_layer_rounded(found, model_folder, choose):
    from calib.dataset import pack_texts
    from calib.text import Tokenizer

    tokens = pack_texts(choose, Tokenizer.open(model_folder), 48, 2)
    for form in ("fp8", "int4_awq"):
        for layer in (0, found.layers - 1):
            expected = by_hand(model_folder, tokens, layer, form)
            [loss] = [one for one in found.losses if (one.layer, one.format) == (layer, form)]
            assert loss.delta_nll == pytest.approx(expected, abs=2e-4)


def test_a_layer_with_a_loud_useless_channel_stands_out(model_folder, choose, tmp_path):
    """It takes the int8 scale of every token for itself, and nothing reads it."""
    spoiled = tmp_path / "spoiled"
    shutil.copytree(model_folder, spoiled)
    weights = load_file(spoiled / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"][5] *= 300
    for name in ("q_proj", "k_proj", "v_proj"):
        weights[f"model.layers.1.self_attn.{name}.weight"][:, 5] = 0
    save_file(weights, spoiled / "model.safetensors", metadata={"format": "pt"})
    found = measure(spoiled, choose, tmp_path / "out", formats=("int8",), rows=1, length=48)
    ranked = sorted(found.modules, key=lambda noise: noise.sqnr_db)
    assert {noise.module.rpartition(".")[2] for noise in ranked[:3]} == {"q_proj", "k_proj", "v_proj"}
    assert {noise.layer for noise in ranked[:3]} == {1}
    assert ranked[2].sqnr_db < ranked[3].sqnr_db - 10
    assert found.facts[1].amax > 10 * found.facts[0].amax
    assert found.losses[1].sqnr_db < found.losses[0].sqnr_db


def test_a_killed_run_goes_on_and_ends_alike(found, model_folder, choose, tmp_path):
    def stop(event):
        if event.done > 0.6 * event.total:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        measure(model_folder, choose, tmp_path / "out", rows=2, length=48, report=stop)
    assert (tmp_path / ".out.work" / "sums.json").is_file()
    seen = []
    again = measure(model_folder, choose, tmp_path / "out", rows=2, length=48, report=seen.append)
    assert again == found
    assert min(event.done for event in seen) >= seen[0].total / 2
    assert open_sensitivity(tmp_path / "out") == found
    assert not (tmp_path / ".out.work").exists()


def test_what_cannot_be_measured_is_refused(model_folder, choose, tmp_path):
    with pytest.raises(CalibError, match="quantizes nothing"):
        measure(model_folder, choose, tmp_path / "out", formats=("bf16",))
    with pytest.raises(CalibError, match="one row needs"):
        measure(model_folder, ["short"], tmp_path / "out", length=64)
    with pytest.raises(ArtifactError):
        open_sensitivity(tmp_path)
    assert sqnr_db(100.0, 1.0) == pytest.approx(20.0)
    assert sqnr_db(1.0, 0.0) is None


def test_rounding_is_the_grids_own():
    weight = torch.tensor([[1.0, -7.0], [0.0, 0.0]])
    grid = Grid(dtype="int4", granularity={"kind": "channel"})
    assert torch.equal(round_weight(grid, weight), weight)
    tiles = Grid(dtype="fp8_e4m3", granularity={"kind": "block", "rows": 1, "cols": 2})
    assert torch.equal(round_weight(tiles, torch.tensor([[1.0, 448.0], [3.0, 3.0]])),
                       torch.tensor([[1.0, 448.0], [3.0, 3.0]]))
    static = Scheme(activation=Grid(dtype="int8"))
    x = torch.tensor([[0.1, 1.27]])
    assert torch.allclose(round_input(static, x, torch.tensor(1.27)), fake_quantize(Grid(dtype="int8"), x,
                                                                                   torch.tensor(0.01)))
    assert round_input(Scheme(), x, torch.tensor(1.0)) is x
