"""Calibration sets: packing, determinism, refusals, fingerprints."""

import json

import pytest
import torch
from tiny_llamas import byte_tokenizer, sentences, write_jsonl

from calib.dataset import CalibrationSet, CalibrationTextError, check_row_length, overlap, pack_texts, refuse_overlap
from calib.foresee import foresee
from calib.recipe import load_recipe
from calib.text import Tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    byte_tokenizer(tmp_path, add_bos=True)
    return Tokenizer.open(tmp_path)


@pytest.fixture
def texts(tmp_path):
    return write_jsonl(tmp_path / "texts.jsonl", [{"text": text, "id": 3} for text in sentences(1, 20)])


def test_rows_are_packed_documents_with_bos_and_end(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "t.jsonl", [{"text": "ab"}, {"text": "cd"}])
    made = CalibrationSet.build([source], tokenizer, tmp_path / "set", rows=2, length=4)
    flat = made.tokens.flatten().tolist()
    assert flat[::4] == [256, 256]
    assert flat[3::4] == [257, 257]
    assert made.sample.startswith("<|bos|>")
    assert sum(batch.shape[0] for batch in made.batches()) == 2
    assert made.batches()[0].dtype == torch.int64


def test_same_inputs_and_seed_same_digest(tmp_path, tokenizer, texts):
    made = [CalibrationSet.build([texts], tokenizer, tmp_path / f"set{i}", rows=4, length=32, seed=seed)
            for i, seed in enumerate((0, 0, 1))]
    assert made[0].digest == made[1].digest != made[2].digest
    assert torch.equal(CalibrationSet.open(tmp_path / "set0").tokens, made[1].tokens)


def test_rows_are_drawn_by_seed_and_batches_hold_eight(tmp_path, tokenizer, texts):
    made = CalibrationSet.build([texts], tokenizer, tmp_path / "set", rows=20, length=16)
    assert [batch.shape[0] for batch in made.batches()] == [8, 8, 4]
    assert torch.equal(made.batches(6, 1)[0], made.batches(6, 1)[0])
    assert not torch.equal(made.batches(6, 1)[0], made.batches(6, 2)[0])


def test_licences_from_the_manifest_beside(tmp_path, tokenizer, texts):
    (tmp_path / "manifest.json").write_text(json.dumps({"files": {"texts.jsonl": {"licence": "CC-BY-4.0"}}}))
    made = CalibrationSet.build([texts], tokenizer, tmp_path / "set", rows=2, length=16)
    assert made.licences == {"texts.jsonl": "CC-BY-4.0"}
    other = CalibrationSet.build([texts], tokenizer, tmp_path / "set2", rows=2, length=16,
                                 licences={"texts.jsonl": "MIT"})
    assert other.licences == {"texts.jsonl": "MIT"}


def test_the_chat_template_only_on_request(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "c.jsonl", [{"messages": [{"role": "user", "content": "hello there"}]}] * 4)
    made = CalibrationSet.build([source], tokenizer, tmp_path / "set", rows=1, length=16, chat=True)
    assert "<|user|>hello" in made.sample
    assert made.artifact.record["template_sha256"] == tokenizer.template_sha256
    with pytest.raises(CalibrationTextError, match="messages"):
        CalibrationSet.build([source], tokenizer, tmp_path / "set2", rows=1, length=16)


@pytest.mark.parametrize(("content", "what"), [
    ("", "is empty"), ("\n\n", "is empty"), ("{", ":1 is not JSON"), ('{"text": "a"}\n{"txt": 1}', ":2 has neither"),
    ('{"text": 3}', "is a int"), ('{"text": "too short"}', "tokens, 64 are needed")])
def test_bad_files_are_refused_and_leave_nothing(tmp_path, tokenizer, content, what):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(CalibrationTextError, match=what):
        CalibrationSet.build([tmp_path / "bad.jsonl"], tokenizer, tmp_path / "set", rows=2, length=32)
    assert not (tmp_path / "set").exists()


def test_a_missing_file_and_another_models_set_are_refused(tmp_path, tokenizer, texts):
    with pytest.raises(CalibrationTextError, match=r"none\.jsonl"):
        CalibrationSet.build([tmp_path / "none.jsonl"], tokenizer, tmp_path / "set")
    made = CalibrationSet.build([texts], tokenizer, tmp_path / "set", rows=2, length=16)
    (tmp_path / "other").mkdir()
    byte_tokenizer(tmp_path / "other", add_bos=False)
    with pytest.raises(CalibrationTextError, match="another model"):
        made.check_tokenizer(Tokenizer.open(tmp_path / "other"))


def test_overlap_by_document_and_by_thirteen_words(tmp_path, tokenizer, texts):
    made = CalibrationSet.build([texts], tokenizer, tmp_path / "set", rows=4, length=256)
    own = sentences(1, 20)
    refuse_overlap(made, sentences(9, 20), "calibration and evaluation")
    assert overlap(made, [own[0].upper() + "!!", *own[1:]])[0] > 0
    part = ["Quite another text, but: " + " ".join(text.split()[5:18]) for text in own]
    assert overlap(made, part)[0] == 0
    with pytest.raises(CalibrationTextError, match="calibration and evaluation share 0 documents"):
        refuse_overlap(made, part, "calibration and evaluation")
    assert overlap(["one two three"], ["four five"]) == (0, 0)


def test_packing_choose_texts(tokenizer):
    assert pack_texts(["abcdef"] * 9, tokenizer, 4, 3).shape == (3, 4)
    with pytest.raises(CalibrationTextError, match="one row needs 64"):
        pack_texts(["ab"], tokenizer, 64, 2)


def test_rows_longer_than_the_models_positions_are_refused(model_folder):
    from calib.config import positions
    with pytest.raises(CalibrationTextError, match="1,000,000,000,000 tokens, the model knows") as refused:
        foresee(model_folder, load_recipe("fp8"), length=10**12)
    assert "(--length)" in refused.value.hint
    check_row_length(64, 64)
    check_row_length(64, None)
    with pytest.raises(CalibrationTextError, match="64 tokens, the model knows 63"):
        check_row_length(64, 63)
    assert positions({}) is None
    assert positions({"max_position_embeddings": 64}) == 64
    stretched = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    assert positions(stretched) == 256
    written_out = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert positions({"max_position_embeddings": 64, "rope_parameters": written_out}) == 64
    reached = {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    assert positions(reached) == 64
