import json
from pathlib import Path

import numpy as np
import pytest

from tpconvert.errors import ConfigError
from tpconvert.train import text
from tpconvert.train.config import Data
from tpconvert.train.text import ByteTokenizer, documents, find_files, open_tokenizer, open_tokens, tokenize


def tokens_of(tmp_path: Path, **data):
    return open_tokens(tokenize(Data(**data), ByteTokenizer(), tmp_path / "cache"))


def test_documents_are_joined_with_an_end_after_each(tmp_path: Path):
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.txt").write_text("c")
    tokens = tokens_of(tmp_path, path=str(tmp_path / "*.txt"))
    assert tokens.ids.tolist() == [97, 98, 256, 99, 256]
    assert tokens.starts.tolist() == [0, 3, 5]


def test_lines_of_a_text_file_can_be_documents(tmp_path: Path):
    (tmp_path / "a.txt").write_text("ab\n\ncd\n")
    assert tokens_of(tmp_path, path=str(tmp_path), documents="line").starts.tolist() == [0, 3, 6]


def test_jsonl_is_read_by_its_field(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"body": "ab"}\n\n{"body": "c"}\n')
    assert tokens_of(tmp_path, path=str(tmp_path / "a.jsonl"), field="body").ids.tolist() == [97, 98, 256, 99, 256]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ('{"body": "x"}', "line 2: there is no text under the key 'text'; its keys are body. Set data.field."),
        ('{"text": [5], "n": 1}', "line 2: under the key 'text' is [5], which is no text. Set data.field."),
        ("[1]", "line 2: there is no text under the key 'text'"),
    ],
)
def test_a_bad_line_of_jsonl_is_named(tmp_path: Path, line: str, message: str):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        list(documents([file], Data(path=str(file))))
    assert message in str(caught.value) and str(file) in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"data\.path: there is no file .*nowhere\.txt \(looked in "):
        find_files(Data(path="nowhere.txt"))


def test_a_folder_without_text_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no \.txt or \.jsonl file"):
        find_files(Data(path=str(tmp_path)))


def test_empty_data_is_an_error_and_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match="there is no text in"):
        tokens_of(tmp_path, path=str(tmp_path / "a.txt"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match=r"a\.txt: not UTF-8 text \(byte 2"):
        tokens_of(tmp_path, path=str(tmp_path / "a.txt"))


def test_long_documents_are_tokenized_in_chunks_without_losing_a_character(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(text, "_CHUNK", 16)
    words = "".join(f"{i} {'x' * (i % 40)}\n" for i in range(60))
    (tmp_path / "a.txt").write_text(words)
    (tmp_path / "b.txt").write_text("tail")
    tokens = tokens_of(tmp_path, path=str(tmp_path / "*.txt"))
    assert bytes(tokens.ids[: tokens.starts[1] - 1].astype(np.uint8)).decode() == words
    assert len(tokens.starts) == 3


def test_tokens_are_made_once_and_again_when_a_file_changes(tmp_path: Path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("ab")
    first = tokenize(Data(path=str(file)), ByteTokenizer(), tmp_path / "cache")
    monkeypatch.setattr(ByteTokenizer, "encode", None)
    assert tokenize(Data(path=str(file)), ByteTokenizer(), tmp_path / "cache") == first
    monkeypatch.undo()
    file.write_text("abc")
    assert tokenize(Data(path=str(file)), ByteTokenizer(), tmp_path / "cache") != first


def test_a_folder_without_a_tokenizer_says_what_to_set(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"there is no tokenizer in this folder\. Set data\.tokenizer"):
        open_tokenizer(Data(path="x"), tmp_path)


def save_tokenizer(folder: Path, **special: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "</s>", "a", "b", "c", "[UNK]"]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", **special).save_pretrained(folder)


def test_the_tokenizer_of_the_folder_is_used(tmp_path: Path):
    save_tokenizer(tmp_path, eos_token="</s>", pad_token="[PAD]")
    tokenizer = open_tokenizer(Data(path="x"), tmp_path)
    assert tokenizer.encode(["a b", "c"]) == [[5, 6], [7]]
    assert (tokenizer.start, tokenizer.end, tokenizer.pad, tokenizer.mask) == (None, 4, 0, None)


def test_a_damaged_tokenizer_is_one_line(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"nothing": 1}))
    with pytest.raises(ConfigError, match="no tokenizer can be opened") as caught:
        open_tokenizer(Data(path="x"), tmp_path)
    assert "\n" not in str(caught.value)
