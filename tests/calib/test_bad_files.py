"""Damaged and hostile model folders, texts and settings: each is an error with a hint that names what was found."""

import json
import re
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from calib.architecture import check_weights
from calib.artifact import Artifact
from calib.artifact_writer import ArtifactWriter
from calib.checkpoint import QuantizedCheckpoint
from calib.config import check_complete, check_config, read_config
from calib.dataset import CalibrationSet, CalibrationTextError
from calib.errors import ArtifactError, CalibError
from calib.formats.hf import INDEX, SINGLE, MissingWeightsError, Shards, read_header
from calib.json_text import parse_json, parse_object
from calib.layers import natural_key
from calib.text import Tokenizer, check_vocabulary
from calib.verify import verify_checkpoint
from calib.yaml_text import read_yaml

Q = "model.layers.0.self_attn.q_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture
def folder(model_folder, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(model_folder, tmp_path / "model")


def header_of(path):
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:8 + length]), content[8 + length:]


def write_header(path, header, body):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def change(key, value):
    def edit(header):
        header[Q][key] = value
        return header
    return edit


def twice(header):
    text = json.dumps(header)
    return (text[:-1] + f', "{Q}": {json.dumps(header[Q])}}}').encode()


@pytest.mark.parametrize(("edit", "message"), [
    (lambda header: [1, 2], "a list, not a JSON object"), (lambda header: dict.fromkeys(header, "x"), "no dtype"),
    (lambda header: b"[" * 100_000, "nested too deeply"), (lambda header: b"{" + b"\xff" * 9, "not UTF-8"),
    (lambda header: header | {Q: {"dtype": "BF16", "shape": [64, 64]}}, "no dtype, shape and offsets"),
    (change("shape", "64"), "no dtype, shape"), (change("shape", [-64, -64]), "no dtype, shape"),
    (change("data_offsets", [-10, 20]), "no dtype, shape"), (change("dtype", "F99"), "unknown dtype 'F99'"),
    (change("dtype", "F32"), "is F32 [64, 64] and takes 8192 bytes"), (change("shape", [64, 65]), "takes 8192 bytes"),
    (lambda header: header | {K: header[Q]}, "begins at"), (twice, "occurs twice"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_lying_header_is_not_believed(folder, edit, message):
    header, body = header_of(folder / SINGLE)
    write_header(folder / SINGLE, edit(header), body)
    with pytest.raises(MissingWeightsError, match=re.escape(message)) as caught:
        read_header(folder / SINGLE)
    assert caught.value.hint


def test_a_cut_file_and_a_folder_in_its_place(folder):
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:-1])
    with pytest.raises(MissingWeightsError, match="truncated"):
        Shards(folder)
    (folder / SINGLE).unlink()
    (folder / SINGLE).mkdir()
    with pytest.raises(MissingWeightsError, match="cannot be read"):
        Shards(folder)


def sharded(folder, edit):
    """The folder in two shards, after ``edit(shards, weight_map)``."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    shards = {"a.safetensors": {name: tensors[name] for name in names[:5]},
              "b.safetensors": {name: tensors[name] for name in names[5:]}}
    placed = {name: file for file, held in shards.items() for name in held}
    placed = edit(shards, placed) or placed
    (folder / SINGLE).unlink()
    for file, held in shards.items():
        save_file(held, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    return names


@pytest.mark.parametrize(("edit", "message"), [
    (lambda shards, placed: [1], "no weight_map"), (lambda shards, placed: {"w": 3}, "places w in 3"),
    (lambda shards, placed: {"w": "../b.safetensors"}, "no file of the folder"),
    (lambda shards, placed: {"w": "/etc/passwd"}, "no file of the folder"),
    (lambda shards, placed: placed | {min(placed): "c.safetensors"}, "c.safetensors is missing"),
    (lambda shards, placed: placed | {min(placed): "b.safetensors"}, "does not hold"),
    (lambda shards, placed: placed | {"model.other": "b.safetensors"}, "does not hold"),
    (lambda shards, placed: shards["b.safetensors"].update(
        {min(placed): torch.zeros_like(shards["a.safetensors"][min(placed)])}), "is in a.safetensors and in b")])
def test_an_index_must_agree_with_its_shards(folder, edit, message):
    sharded(folder, edit)
    with pytest.raises(MissingWeightsError, match=re.escape(message)):
        Shards(folder)


def test_sound_shards_open(folder):
    names = sharded(folder, lambda shards, placed: None)
    assert sorted(Shards(folder)) == names


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_attention_heads": 0}, "num_attention_heads is 0"), ({"num_attention_heads": "4"}, "is '4', not a whole"),
    ({"num_attention_heads": 4.0}, "4.0"), ({"num_attention_heads": 3}, "cannot share"),
    ({"num_hidden_layers": 10**9}, "1 to 4,096"), ({"num_hidden_layers": True}, "True"),
    ({"hidden_size": -64}, "-64"), ({"hidden_size": 66, "head_dim": None}, "cannot be divided"),
    ({"vocab_size": None}, "None"),
    ({"rms_norm_eps": 0}, "not a number above 0"), ({"rope_parameters": "x"}, "not an object"),
    ({"rope_parameters": {"rope_theta": float("nan")}}, "nan"),
    ({"rope_scaling": {"rope_type": "su"}}, "rope_scaling: rope_type is 'su', which is not supported"),
    ({"rope_scaling": {"type": "ntk"}}, "rope_scaling: type is 'ntk', which is not supported"),
    ({"rope_parameters": {"full_attention": {"rope_type": None}}}, "full_attention: rope_type is None"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling: factor is '2', not a number above 0"),
    ({"rope_theta": "big"}, "'big'"),
    ({"architectures": {"a": 1}}, "not a list of names"), ({"architectures": [["Llama"]]}, "not a list of names"),
    ({"model_type": 5}, "not a name"), ({"tie_word_embeddings": "maybe"}, "not true or false"),
    ({"quantization_config": [1]}, "not an object"), ({"max_position_embeddings": "a lot"}, "'a lot'")])
def test_a_config_value_that_cannot_be_meant_is_named(folder, changes, message):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CalibError, match=re.escape(message)):
        read_config(folder)
    [fault] = verify_checkpoint(folder)
    assert message in fault.message


@pytest.mark.parametrize(("text", "message"), [
    (b"", "not JSON"), (b"[]", "a list"), (b"5", "a number"), (b"[" * 100_000, "nested"), (b"\xff{}", "not UTF-8"),
    (b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"), ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    (b'{"a": "\\ud800"}', "surrogate"), (b'{"a": 1, "b": {"c": 2, "c": 3}}',
     r"config\.json: the name 'c' occurs twice, with 2 and 3\nKeep one of the two")])
def test_what_is_no_config_is_refused(folder, text, message):
    (folder / "config.json").write_bytes(text)
    with pytest.raises(CalibError, match=message):
        read_config(folder)


def test_json_is_read_as_it_is_meant():
    assert parse_json('{"a": "\\ud83d\\ude00"}', "x", CalibError) == {"a": "\U0001f600"}
    assert parse_object(b'\xef\xbb\xbf{"a": 1}', "x", CalibError) == {"a": 1}
    with pytest.raises(CalibError, match="'a' occurs twice"):
        parse_json('{"a": 1, "a": 2}', "x", CalibError)


def test_an_unknown_rope_is_told_the_known_ones(folder):
    config = read_config(folder) | {"rope_scaling": {"rope_type": "su", "factor": 2.0}}
    with pytest.raises(CalibError) as error:
        check_config(config, "config.json")
    assert error.value.hint == "Supported: default, linear, dynamic, yarn, llama3, longrope."


def test_a_missing_key_of_the_architecture_is_named(folder):
    config = read_config(folder)
    del config["hidden_size"]
    with pytest.raises(CalibError, match="no 'hidden_size'"):
        check_complete(config, "config.json")


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight belongs to no layer"),
    ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
    ({"intermediate_size": 64}, "gate_proj.weight has shape [128, 64], config.json says [64, 64]"),
    ({"num_key_value_heads": 4}, "k_proj.weight has shape"), ({"head_dim": 32}, "q_proj.weight has shape"),
    ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
    ({"attention_bias": True}, "q_proj.bias is missing"), ({"vocab_size": 300}, "embed_tokens.weight has shape"),
    ({"model_type": "nothing-known"}, "no model that can be built")])
def test_weights_and_config_of_two_models(folder, changes, message):
    with pytest.raises(CalibError, match=re.escape(message)):
        check_weights(read_config(folder) | changes, Shards(folder))


@pytest.mark.parametrize(("edit", "message"), [
    (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
    (lambda tensors: tensors.update({Q: tensors[Q].reshape(-1)}), "q_proj.weight has shape [4096]"),
    (lambda tensors: tensors.update({Q: tensors[Q].to(torch.int16)}), "is I16; unquantized weights are"),
    (lambda tensors: tensors.update({"model.layers.0.input_layernorm.weight": torch.ones(1, 64)}), "[1, 64]")])
def test_a_tensor_that_no_loader_may_guess(folder, edit, message):
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE)
    with pytest.raises(MissingWeightsError, match=re.escape(message)):
        check_weights(read_config(folder), Shards(folder))
    assert verify_checkpoint(folder)


def test_a_dead_layer_is_a_fault(folder):
    tensors = load_file(folder / SINGLE)
    tensors[Q].zero_()
    save_file(tensors, folder / SINGLE)
    assert [(fault.code, fault.where) for fault in verify_checkpoint(folder)] == [("all_zero", Q)]


def test_tensor_names_are_sorted_whatever_their_digits():
    assert natural_key("layers.1²") != natural_key("layers.12")


@pytest.mark.parametrize(("name", "content", "message"), [
    ("tokenizer_config.json", [1], "a list, not"), ("tokenizer_config.json", {"bos_token": 5}, "bos_token is 5"),
    ("tokenizer_config.json", {"eos_token": "<nowhere>"}, "'<nowhere>' is not in the vocabulary"),
    ("tokenizer_config.json", {"bos_token": "<nowhere>", "add_bos_token": True}, "'<nowhere>' is not in"),
    ("tokenizer_config.json", {"add_bos_token": "yes"}, "'yes', not true or false"),
    ("tokenizer_config.json", {"chat_template": 5}, "is a int"),
    ("tokenizer_config.json", {"chat_template": [{"name": "default"}, 3], "eos_token": None}, None),
    ("generation_config.json", b'{"eos_token_id": 1, "eos_token_id": 2}',
     "generation_config.json: the name 'eos_token_id' occurs twice"),
    ("tokenizer_config.json", b'{"add_bos_token": true, "add_bos_token": false}', "'add_bos_token' occurs twice"),
    ("special_tokens_map.json", b'{"bos_token": "a", "bos_token": "b"}', "the name 'bos_token'"),
    ("generation_config.json", {"eos_token_id": "x"}, "'x', which is no token"),
    ("generation_config.json", {"eos_token_id": [1, -1]}, "-1, which is no token"),
    ("generation_config.json", {"eos_token_id": 1.5}, "1.5"), ("generation_config.json", [], "a list, not"),
    ("chat_template.jinja", b"\xff\xfe", "not UTF-8")])
def test_a_tokenizer_file_that_says_nonsense(folder, name, content, message):
    (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    if message is None:
        assert not Tokenizer.open(folder).has_template
        return
    with pytest.raises(CalibError, match=re.escape(message)):
        Tokenizer.open(folder)


def test_an_end_token_beyond_the_model_is_another_models(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": 99999}')
    with pytest.raises(CalibError, match="end token 99999 is beyond"):
        check_vocabulary(Tokenizer.open(folder), 264)


LINE = json.dumps({"text": "ash birch cedar " * 40})


@pytest.mark.parametrize(("content", "message"), [
    (b"\x80\x81" * 50, "not UTF-8"), (b"[" * 100_000, "nested"), (b'{"text": "\\ud800"}', "surrogate"),
    (b'{"text": ' + b"9" * 5000 + b"}", "4300 digits"), (b'{"messages": "hi"}', "messages 'hi'"),
    (b'{"messages": [1]}', "messages '[1]'"), (b'{"messages": null}', "messages"), (b'{"text": null}', "NoneType")])
def test_a_calibration_line_that_cannot_be_used(folder, tmp_path, content, message):
    (tmp_path / "texts.jsonl").write_bytes(LINE.encode() + b"\n" + content)
    with pytest.raises(CalibrationTextError, match=re.escape(message)):
        CalibrationSet.build([tmp_path / "texts.jsonl"], Tokenizer.open(folder), tmp_path / "out", rows=20, length=64,
                             chat=b"messages" in content)
    assert not (tmp_path / "out").exists()


def test_line_separators_inside_a_text_do_not_end_the_line(folder, tmp_path):
    text = "one\u2028two\x85three\x0bfour " * 20
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False), encoding="utf-8")
    made = CalibrationSet.build([tmp_path / "texts.jsonl"], Tokenizer.open(folder), tmp_path / "out", rows=2, length=64)
    assert made.rows == 2
    assert "\u2028" in made.sample


@pytest.mark.parametrize("size", [{"rows": 0}, {"rows": -1}, {"length": 0}])
def test_no_rows_are_no_calibration_set(folder, tmp_path, size):
    (tmp_path / "texts.jsonl").write_text(LINE)
    with pytest.raises(CalibrationTextError, match="no calibration set"):
        CalibrationSet.build([tmp_path / "texts.jsonl"], Tokenizer.open(folder), tmp_path / "out", **size)


def bomb(levels=12):
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(("text", "message"), [
    ("a: 1\nb: 2\na: 3\n", "'a' occurs twice"), (bomb(), "aliases are not read"), ("[" * 3000, "nested deeper"),
    ("a: 2026-01-01", "timestamp"), ("a: 2026-99-99", "timestamp"), ("a: .nan", "no finite number"),
    ("a: !!python/object:os.system {}", "the tag 'tag:yaml.org,2002:python/object:os.system' is not read"),
    ("a: !!set {b}", "set values are not read"),
    ("? [1, 2]\n: 3", "a key must be plain text"), ("a: " + "9" * 5000, "4300 digits"), ("- a", "list, not a mapping"),
    ("", "x.yaml is empty"), ('a: "\\ud800"', "line 1, column 4: half of a surrogate"),
    ("a: {b: 1, b: 2}", "'b' occurs twice"), ("a: \x00", "not YAML"), ("<<: {a: 1}", "merge values")])
def test_yaml_is_read_as_plain_data(tmp_path, text, message):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(CalibError, match=re.escape(message)):
        read_yaml(tmp_path / "x.yaml", CalibError, "hint")


def test_yaml_that_is_binary_or_huge(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"a: \xff")
    with pytest.raises(CalibError, match="not YAML"):
        read_yaml(tmp_path / "x.yaml", CalibError, "hint")
    (tmp_path / "x.yaml").write_text("a: " + "x" * 2_000_000)
    with pytest.raises(CalibError, match="2,000,003 bytes"):
        read_yaml(tmp_path / "x.yaml", CalibError, "hint")


def test_a_flipped_byte_is_seen_when_the_file_is_used(tmp_path):
    with ArtifactWriter(tmp_path / "a", "verdict") as writer:
        (writer.folder / "scales").write_bytes(b"\0" * 100)
    (tmp_path / "a" / "scales").write_bytes(b"\0" * 99 + b"\1")
    with pytest.raises(ArtifactError, match="scales was changed after it was written"):
        Artifact.open(tmp_path / "a").check(["scales"])


def test_nothing_is_written_into_an_artifact(tmp_path):
    with ArtifactWriter(tmp_path / "a", "verdict") as writer:
        (writer.folder / "x").write_bytes(b"x")
    with (pytest.raises(ArtifactError, match="lies inside the artifact"),
          ArtifactWriter(tmp_path / "a" / "b", "verdict")):
        pass
    assert Artifact.open(tmp_path / "a").verify() == []
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    with ArtifactWriter(tmp_path / "c", "verdict"):
        pass


def test_a_replacement_that_was_killed_between_its_renames_loses_nothing(tmp_path):
    with ArtifactWriter(tmp_path / "a", "verdict") as writer:
        (writer.folder / "x").write_bytes(b"x")
    (tmp_path / "a").rename(tmp_path / ".a.old")
    with pytest.raises(ZeroDivisionError), ArtifactWriter(tmp_path / "a", "verdict", replace=True):
        raise ZeroDivisionError
    assert Artifact.open(tmp_path / "a").verify() == []


def test_a_checkpoint_whose_manifest_names_no_recipe(model_folder, tmp_path):
    with ArtifactWriter(tmp_path / "a", "quantized-checkpoint") as writer:
        shutil.copytree(model_folder, writer.folder, dirs_exist_ok=True)
    with pytest.raises(ArtifactError, match="names no recipe"):
        QuantizedCheckpoint.open(tmp_path / "a")
