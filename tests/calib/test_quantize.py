"""The whole stage on tiny Llamas with the real modelopt: what is written is what was in memory, each time the same."""

import json
import multiprocessing
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from tiny_llamas import sentences, tiny_llama

from calib import methods, sanity, stage
from calib.artifact import ArtifactError
from calib.calibrate import quantize
from calib.checkpoint import QuantizedCheckpoint
from calib.dataset import CalibrationSet, CalibrationTextError
from calib.errors import CalibError
from calib.formats.hf import write_shards
from calib.formats.modelopt import ModeloptLayout
from calib.model import load_hf, load_model
from calib.plan import make_plan
from calib.quantizer import CalibrationDataError
from calib.recipe import load_recipe
from calib.sanity import SanityError
from calib.scheme import BF16, Grid
from calib.stage import CoverageError
from calib.text import Tokenizer

#: RMS difference of logits over their RMS, fake-quantized in memory against the dequantized checkpoint. Codes are
#: equal; a static fp8 activation within 1e-6 of a tie may round the other way, which a random model amplifies.
LOGITS_BOUND = 0.05
#: The same module by module on equal inputs: ties only (an fp8 value under an int8 scale meets them often).
MODULE_BOUND = 1e-3
CASES = [("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "bf16"), ("fp8", "fp8"), ("int8", "bf16"), ("int8", "fp8"),
         ("int4_awq", "bf16"), ("int4_awq", "fp8")]
LAYOUTS = {"bf16 bf16": "hf", "bf16 fp8": "compressed-tensors", "int8 bf16": "compressed-tensors",
           "int8 fp8": "compressed-tensors"}


class Seen:
    """Logits of the model in memory, and input and output of each of its linears."""

    def __init__(self, rows):
        self.rows, self.linears = rows, {}

    def __call__(self, model):
        handles = [module.register_forward_hook(self.hook(name)) for name, module in model.named_modules()
                   if name.endswith("_proj")]
        with torch.inference_mode():
            self.logits = model(self.rows, use_cache=False).logits.clone()
        for handle in handles:
            handle.remove()

    def hook(self, name):
        def keep(module, args, output):
            self.linears[name] = (args[0].clone(), output.clone())
        return keep


@pytest.fixture(scope="module")
def made(model_folder, calibration, choose, tmp_path_factory):
    """Each (recipe, kv) made once: (checkpoint, what was seen in memory)."""
    place, cache = tmp_path_factory.mktemp("made"), {}

    def make(recipe, kv):
        if (recipe, kv) not in cache:
            seen = Seen(calibration.batches()[0][:2])
            cache[recipe, kv] = quantize(model_folder, load_recipe(recipe), place / f"{recipe}-{kv}", kv_cache=kv,
                                         calibration=calibration, choose_texts=choose, inspect=seen), seen
        return cache[recipe, kv]

    return make


def normalised(difference, reference):
    return (difference.pow(2).mean() / reference.pow(2).mean()).sqrt().item()


@pytest.mark.parametrize(("recipe", "kv"), CASES)
def test_the_checkpoint_is_the_model_that_was_inspected(made, recipe, kv):
    checkpoint, seen = made(recipe, kv)
    model = load_model(checkpoint)
    with torch.inference_mode():
        logits = model(seen.rows, use_cache=False).logits
        assert normalised(logits - seen.logits, seen.logits) < LOGITS_BOUND
        for name, (given, output) in seen.linears.items():
            assert normalised(model.get_submodule(name)(given) - output, output) < MODULE_BOUND, name


@pytest.mark.parametrize(("recipe", "kv"), CASES)
def test_layout_schemes_and_side_files(made, model_folder, recipe, kv):
    checkpoint, _ = made(recipe, kv)
    assert checkpoint.layout.name == LAYOUTS.get(f"{recipe} {kv}", "modelopt")
    assert checkpoint.kv == (BF16 if kv == "bf16" else Grid(dtype="fp8_e4m3"))
    assert checkpoint.recipe == recipe
    assert len(checkpoint.schemes) == (0 if recipe == "bf16" else 14)
    assert not any(name.startswith("lm_head") for name, _ in checkpoint.tensors())
    assert checkpoint.tokenizer().digest == QuantizedCheckpoint.open(model_folder).tokenizer().digest
    assert checkpoint.tokenizer().eos_ids == (257, 259)
    config = json.loads((checkpoint.path / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize(("recipe", "kv"), CASES)
def test_the_size_is_the_planned_one_and_the_rest_is_bf16(made, model_folder, recipe, kv):
    checkpoint, _ = made(recipe, kv)
    assert checkpoint.size_bytes == make_plan(model_folder, load_recipe(recipe), kv).size_bytes
    assert {tensor.dtype for name, tensor in checkpoint.tensors()
            if name.endswith(".weight") and name.removesuffix(".weight") not in checkpoint.schemes} == {torch.bfloat16}


def test_int8_is_what_vllm_reads(made):
    """int-quantized, channel x token dynamic, neither input_scale nor pre_quant_scale."""
    checkpoint, _ = made("int8", "bf16")
    section = json.loads((checkpoint.path / "config.json").read_text())["quantization_config"]
    group = section["config_groups"]["group_0"]
    assert (section["quant_method"], section["format"]) == ("compressed-tensors", "int-quantized")
    assert (group["weights"]["strategy"], group["weights"]["num_bits"]) == ("channel", 8)
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("token", True)
    stored = load_file(checkpoint.path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    assert stored[f"{name}.weight"].dtype == torch.int8
    assert stored[f"{name}.weight_scale"].shape == (64, 1)
    assert not any(key.endswith(("input_scale", "pre_quant_scale")) for key in stored)


def test_int4_keeps_a_pre_quant_scale_only_where_no_norm_can_take_it(made):
    checkpoint, _ = made("int4_awq", "bf16")
    held = {name for name, scheme in checkpoint.schemes.items() if scheme.pre_quant_scale}
    assert {name.rpartition(".")[2] for name in held} == {"o_proj", "down_proj"}
    assert json.loads((checkpoint.path / "hf_quant_config.json").read_text())["quantization"]["group_size"] == 64


def test_smoothing_is_chosen_by_the_lowest_measured_loss(made):
    checkpoint, _ = made("int8", "bf16")
    losses = json.loads(checkpoint.artifact.file("calibration.json").read_text())["losses"]
    assert set(losses) == {f"alpha {alpha:g}" for alpha in load_recipe("int8").alphas}
    assert losses[f"alpha {checkpoint.artifact.record['alpha']:g}"] == min(losses.values())


@pytest.mark.parametrize("recipe", ["fp8", "int8", "int4_awq"])
def test_the_same_inputs_give_the_same_digest(made, model_folder, calibration, choose, tmp_path, recipe):
    again = quantize(model_folder, load_recipe(recipe), tmp_path / "again", calibration=calibration,
                     choose_texts=choose)
    assert again.digest == made(recipe, "bf16")[0].digest
    assert again.artifact.parents == [calibration.digest]


def test_stdout_stays_clean_and_progress_counts(model_folder, calibration, tmp_path, capfd):
    events = []
    quantize(model_folder, load_recipe("fp8"), tmp_path / "out", calibration=calibration, report=events.append)
    assert capfd.readouterr().out == ""
    layers = [(event.done, event.total) for event in events if event.stage == "calibrate"]
    assert layers == [(1, 2), (2, 2)]


def test_protected_layers_are_the_measured_ones_and_stay_bf16(model_folder, calibration, choose, tmp_path):
    (tmp_path / "r.yaml").write_text("extends: fp8\nname: guarded\nprotect: 1\nchoose_tokens: 64\n")
    made = quantize(model_folder, load_recipe(tmp_path / "r.yaml"), tmp_path / "out", calibration=calibration,
                    choose_texts=choose)
    losses = json.loads(made.artifact.file("calibration.json").read_text())["losses"]
    best = min((0, 1), key=lambda layer: losses[f"protect layer {layer}"])
    assert made.artifact.record["protected_layers"] == [best]
    assert {name.split(".")[2] for name in made.schemes} == {str(1 - best)}
    assert "protected" in made.artifact.record["unquantized"][f"model.layers.{best}.mlp.up_proj"]


def _quantize_until_killed(model_folder, calibration, choose, out):
    torch.set_num_threads(1)  # OpenMP's workers do not survive a fork: with more, its first loop would wait for them
    measured, pause = methods.mean_nll, []

    def slow(model, tokens):
        pause.append(1)
        if len(pause) == 3:
            time.sleep(600)
        return measured(model, tokens)

    methods.mean_nll = slow
    quantize(model_folder, load_recipe("int8"), out, calibration=calibration, choose_texts=choose)


def test_killed_in_the_middle_it_goes_on_and_ends_with_the_same_digest(made, model_folder, calibration, choose,
                                                                      tmp_path, monkeypatch):
    out, alone = tmp_path / "out", made("int8", "bf16")[0].digest
    process = multiprocessing.get_context("fork").Process(
        target=_quantize_until_killed, args=(model_folder, calibration, choose, out))
    process.start()
    try:
        losses = tmp_path / ".out.work" / "losses.json"
        deadline = time.monotonic() + 120
        while not (losses.is_file() and len(json.loads(losses.read_text())["values"]) == 2):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(ArtifactError, match="another process is writing"):
            quantize(model_folder, load_recipe("bf16"), out, calibration=calibration)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert not out.exists()
    calls, measure = [], methods.mean_nll
    monkeypatch.setattr(methods, "mean_nll", lambda *args: calls.append(1) or measure(*args))
    again = quantize(model_folder, load_recipe("int8"), out, calibration=calibration, choose_texts=choose)
    assert again.digest == alone
    assert len(calls) == len(load_recipe("int8").alphas) - 2
    assert not losses.parent.exists()


def test_what_was_measured_for_one_kv_cache_is_not_measured_for_another(made, model_folder, calibration, choose,
                                                                       tmp_path, monkeypatch):
    alone = made("int8", "fp8")[0].digest
    calls, measure = [], methods.mean_nll
    monkeypatch.setattr(methods, "mean_nll", lambda *args: calls.append(1) or measure(*args))
    settings = {"calibration": calibration, "choose_texts": choose, "measured": tmp_path / "measured"}
    quantize(model_folder, load_recipe("int8"), tmp_path / "a", **settings)
    assert len(calls) == len(load_recipe("int8").alphas)
    again = quantize(model_folder, load_recipe("int8"), tmp_path / "b", kv_cache="fp8", **settings)
    assert len(calls) == len(load_recipe("int8").alphas)
    assert again.digest == alone
    quantize(model_folder, load_recipe("int8"), tmp_path / "c", resume=False, **settings)
    assert len(calls) == 2 * len(load_recipe("int8").alphas)


def failing(model_folder, calibration, out, recipe="fp8", error=CalibError, match="", **options):
    with pytest.raises(error, match=match):
        quantize(model_folder, load_recipe(recipe), out, calibration=calibration, **options)
    assert not out.exists()
    assert not list(out.parent.glob(".*.partial"))


def test_a_module_that_saw_nothing_is_named(calibration, tmp_path):
    folder = tiny_llama(tmp_path / "dead")
    tensors = {name: tensor for name, tensor in load_hf(folder, torch.bfloat16).state_dict().items()
               if name != "lm_head.weight"}
    tensors["model.layers.1.self_attn.v_proj.weight"].zero_()
    write_shards(folder, tensors.items())
    failing(folder, calibration, tmp_path / "out", error=CalibrationDataError, match=r"layers\.1\.self_attn\.v_proj")


@pytest.mark.parametrize("recipe", ["int8", "int4_awq"])
def test_dead_rows_and_groups_get_a_harmless_scale(calibration, choose, tmp_path, recipe):
    folder = tiny_llama(tmp_path / "rows")
    tensors = {name: tensor for name, tensor in load_hf(folder, torch.bfloat16).state_dict().items()
               if name != "lm_head.weight"}
    tensors["model.layers.0.mlp.up_proj.weight"][5:7].zero_()
    write_shards(folder, tensors.items())
    made = quantize(folder, load_recipe(recipe), tmp_path / "out", calibration=calibration, choose_texts=choose)
    found = dict(made.tensors())
    assert (found["model.layers.0.mlp.up_proj.weight"][5:7] == 0).all()
    assert (found["model.layers.0.mlp.up_proj.weight_scale"] > 0).all()


def test_token_salad_is_refused_before_it_is_written(model_folder, calibration, tmp_path, monkeypatch):
    def broken(model, plan, schemes, *args):
        run_max(model, plan, schemes, *args)
        with torch.inference_mode():
            model.model.norm.weight.fill_(40.0)
    run_max = methods.run_max
    monkeypatch.setattr(methods, "run_max", broken)
    failing(model_folder, calibration, tmp_path / "out", error=SanityError, match="loss from")
    monkeypatch.setattr(sanity, "LOSS_LIMIT", 1e9)

    def stuck(model, plan, schemes, *args):
        run_max(model, plan, schemes, *args)
        with torch.inference_mode():
            model.model.norm.weight.fill_(0.0)
    monkeypatch.setattr(methods, "run_max", stuck)
    failing(model_folder, calibration, tmp_path / "out", error=SanityError, match="only repeats")


def test_coverage_that_differs_from_the_plan_is_refused(model_folder, calibration, tmp_path, monkeypatch):
    run_max = methods.run_max

    def forgetful(model, plan, schemes, *args):
        run_max(model, plan, schemes, *args)
        model.get_submodule("model.layers.0.mlp.up_proj.weight_quantizer").disable()
    monkeypatch.setattr(methods, "run_max", forgetful)
    failing(model_folder, calibration, tmp_path / "out", error=CoverageError, match=r"layers\.0\.mlp\.up_proj")
    monkeypatch.setattr(methods, "run_max", run_max)
    write = ModeloptLayout.write

    def corrupting(self, folder, *args):
        write(self, folder, *args)
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors["model.layers.1.mlp.down_proj.input_scale"].zero_()
        from safetensors.torch import save_file
        save_file(tensors, path)
    monkeypatch.setattr(ModeloptLayout, "write", corrupting)
    failing(model_folder, calibration, tmp_path / "out", error=CoverageError, match=r"down_proj\.input_scale")


def test_refused_inputs_leave_nothing(model_folder, calibration, choose, tmp_path, made):
    failing(model_folder, calibration, tmp_path / "a", recipe="int8", error=CalibrationTextError, match="one row")
    failing(model_folder, calibration, tmp_path / "b", recipe="int8", error=CalibrationTextError, match="share",
            choose_texts=sentences(1, 40))
    quantized, _ = made("int8", "bf16")
    failing(quantized.path, calibration, tmp_path / "c", match="already quantized")
    with pytest.raises(CalibError, match="KV cache"):
        quantize(model_folder, load_recipe("bf16"), tmp_path / "d", kv_cache="int3", calibration=calibration)
    with pytest.raises(ArtifactError, match="already exists"):
        quantize(model_folder, load_recipe("bf16"), quantized.path, calibration=calibration)


def test_a_disk_that_fills_up_leaves_nothing(model_folder, calibration, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(stage, "write_shards", full)
    failing(model_folder, calibration, tmp_path / "out", recipe="bf16", error=ArtifactError, match="No space left")


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"attention_bias": True},
                                     {"tie_word_embeddings": False, "mlp_bias": True}])
def test_smoothing_changes_nothing_before_rounding(tmp_path, changes):
    from calib.layers import LLAMA, planned_linears
    from calib.smoothing import fold, restore
    folder = tiny_llama(tmp_path / "m", **changes)
    model, ids = load_hf(folder), torch.arange(24)[None]
    generator = torch.Generator().manual_seed(0)
    amax = {name: torch.rand(model.get_submodule(name).in_features, generator=generator) * 4 + 0.1
            for name in planned_linears(LLAMA, 2)}
    with torch.inference_mode():
        before = model(ids, use_cache=False).logits
        original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        fold(model, LLAMA, amax, 0.5)
        assert normalised(model(ids, use_cache=False).logits - before, before) < 1e-5
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, original[name])}
    assert "model.layers.0.self_attn.o_proj.weight" in changed
    restore(model, LLAMA, QuantizedCheckpoint.open(folder).shards)
    assert all(torch.equal(tensor, original[name]) for name, tensor in model.state_dict().items())


def test_the_demo_model_survives_fp8(demo_model, tmp_path):
    """A real model, a short calibration: the loss hardly moves, the checkpoint is whole and of the planned size."""
    lines = [json.dumps({"text": text}) for text in sentences(3, 30)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    rows = CalibrationSet.build([tmp_path / "t.jsonl"], Tokenizer.open(demo_model), tmp_path / "set", rows=4, length=64)
    made = quantize(demo_model, load_recipe("fp8"), tmp_path / "out", kv_cache="fp8", calibration=rows)
    evidence = json.loads(made.artifact.file("calibration.json").read_text())
    assert abs(evidence["loss_after"] - evidence["loss_before"]) < 0.2
    assert evidence["peak_memory_bytes"] < 6 * 1024**3
    assert made.source_grid == "Q4_1 g32"
    assert made.size_bytes == make_plan(demo_model, load_recipe("fp8"), "fp8").size_bytes
