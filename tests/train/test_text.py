import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tpconvert.errors import ConfigError
from tpconvert.train.examples import rows
from tpconvert.train.examples.objectives import Causal
from tpconvert.train.examples.sources import find_files
from tpconvert.train.examples.text import open_tokens, tokenize
from tpconvert.train.examples.tokenizer import ByteTokenizer, open_tokenizer
from tpconvert.train.settings.config import apply_overrides, make_config
from tpconvert.train.settings.data import Data


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
        ('{"body": "x"}', "line 2: there is no text under the key 'text'; its keys are body. Set data.field, or"),
        ('{"text": [5], "n": 1}', "line 2: under the key 'text' is [5], which is no text. Set data.field, or"),
        ("[1]", "line 2: there is no text under the key 'text'"),
    ],
)
def test_a_bad_line_of_jsonl_is_named(tmp_path: Path, line: str, message: str):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        tokens_of(tmp_path, path=str(file))
    assert message in str(caught.value) and str(file) in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"data\.path: there is no file .*nowhere\.txt \(looked in "):
        find_files(["nowhere.txt"])


def test_a_folder_without_text_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no \.txt, \.jsonl or \.parquet file"):
        find_files([str(tmp_path)])


def test_empty_data_is_an_error_and_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match="there is no text in"):
        tokens_of(tmp_path, path=str(tmp_path / "a.txt"))
    assert not (tmp_path / "cache").exists()


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match=r"a\.txt: not UTF-8 text \(byte 2"):
        tokens_of(tmp_path, path=str(tmp_path / "a.txt"))


def test_long_documents_are_tokenized_in_chunks_without_losing_a_character(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK", 16)
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


@pytest.mark.parametrize("name", ["tokens.json", "ids.bin", "ids.starts.npy"])
def test_tokens_that_were_harmed_are_made_again(tmp_path: Path, name: str):
    (tmp_path / "a.txt").write_text("ab")
    first = tokenize(Data(path=str(tmp_path / "a.txt")), ByteTokenizer(), tmp_path / "cache")
    (first / name).write_bytes((first / name).read_bytes()[:1])
    assert tokens_of(tmp_path, path=str(tmp_path / "a.txt")).ids.tolist() == [97, 98, 256]


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


def test_a_folder_frames_texts_as_its_tokenizer_does(tmp_path: Path):
    from tokenizers import processors

    save_tokenizer(tmp_path, cls_token="[CLS]", sep_token="[SEP]")
    assert open_tokenizer(Data(path="x"), tmp_path).frame == ((), ())
    from tokenizers import Tokenizer

    inner = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(Data(path="x"), tmp_path).frame == ((1,), (2,))


# -- files of other kinds -------------------------------------------------------------------------------------------


def test_gzipped_jsonl_is_read_as_what_is_in_it(tmp_path: Path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "ab"}\n{"text": "c"}\n')
    assert tokens_of(tmp_path, path=str(tmp_path)).ids.tolist() == [97, 98, 256, 99, 256]


def test_a_damaged_gzip_file_is_named(tmp_path: Path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"abc" * 100)[:-10])
    with pytest.raises(ConfigError, match=r"a\.txt\.gz: damaged gzip file"):
        tokens_of(tmp_path, path=str(tmp_path / "a.txt.gz"))


def write_parquet(path: Path, **columns) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_parquet_is_read_by_its_rows(tmp_path: Path):
    write_parquet(tmp_path / "a.parquet", text=["ab", None, "c"])
    with pytest.raises(ConfigError, match=r"a\.parquet, row 2: there is no text under the key 'text'"):
        tokens_of(tmp_path, path=str(tmp_path))
    tokens = tokens_of(tmp_path, path=str(tmp_path), on_bad_line="skip")
    assert tokens.ids.tolist() == [97, 98, 256, 99, 256] and tokens.bad == 1


def test_what_is_no_parquet_file_is_named(tmp_path: Path):
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(ConfigError, match=r"a\.parquet: not a Parquet file"):
        tokens_of(tmp_path, path=str(tmp_path))


def test_a_data_set_is_read_as_from_the_hub(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    (tmp_path / "set").mkdir()
    write_parquet(tmp_path / "set" / "train.parquet", translation=[{"en": "ab", "de": "x"}, {"en": "c", "de": "y"}])
    tokens = tokens_of(tmp_path, hub=str(tmp_path / "set"), field="translation.en")
    assert tokens.ids.tolist() == [97, 98, 256, 99, 256]
    half = tokens_of(tmp_path, hub=str(tmp_path / "set"), field="translation.en", split="train[:50%]")
    assert half.ids.tolist() == [97, 98, 256]


def test_a_data_set_that_cannot_be_opened_is_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"data\.hub: .* cannot be opened") as caught:
        tokens_of(tmp_path, hub=str(tmp_path / "nowhere"))
    assert "\n" not in str(caught.value)


# -- bad lines ------------------------------------------------------------------------------------------------------


def test_bad_lines_are_left_out_counted_and_named(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a"}\n{\n{"text": 5}\n\xff\n[]\n{"text": "b"}\n')
    tokens = tokens_of(tmp_path, path=str(file), on_bad_line="skip")
    assert tokens.ids.tolist() == [97, 256, 98, 256]
    assert tokens.bad == 4 and [line.split(": ")[0] for line in tokens.named] == [
        f"{file}, line {n}" for n in (2, 3, 4)
    ]


def test_a_source_of_bad_lines_only_says_so(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("{\n[\n")
    with pytest.raises(ConfigError, match=r"no text in .*\(2 bad lines were left out, the first: .*a\.jsonl, line 1"):
        tokens_of(tmp_path, path=str(tmp_path), on_bad_line="skip")


def test_a_line_of_text_that_is_not_utf8_is_named(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"ab\n\xff\n")
    with pytest.raises(ConfigError, match=r"a\.txt, line 2: not UTF-8 text \(byte 0"):
        tokens_of(tmp_path, path=str(tmp_path / "a.txt"), documents="line")


# -- pairs, classes, tags -------------------------------------------------------------------------------------------


def write_lines(path: Path, *items: object) -> str:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


def test_pairs_have_a_source_with_its_prefix_and_a_target(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "ab", "target": "c"}, {"text": "d", "target": "ef"})
    tokens = tokens_of(tmp_path, path=path, objective="seq2seq", prefix="x")
    assert tokens.row(0).tolist() == [120, 97, 98] and tokens.more["target"].row(1).tolist() == [101, 102]


def test_an_answer_goes_on_from_its_question_which_is_not_asked_for(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "ab", "to": "c"}, {"text": "d", "to": "ef"})
    tokens = tokens_of(tmp_path, path=path, target="to")
    assert tokens.ids.tolist() == [97, 98, 99, 256, 100, 101, 102, 256] and tokens.starts.tolist() == [0, 4, 8]
    example = Causal(tokens, 7, True, 0, boundaries=True)(0, 0)
    assert example["labels"].tolist() == [-100, 99, 256, -100, 101, 102, 256]
    alone = Causal(tokens, 6, False, 0)(1, 0)
    assert alone["ids"].tolist() == [100, 101, 102, 256, 0, 0]
    assert alone["labels"].tolist() == [101, 102, 256, -100, -100, -100]


def labelled(tmp_path: Path, *items: object, names: dict[str, int] | None = None, **data):
    data = Data(path=write_lines(tmp_path / "a.jsonl", *items), **data)
    return open_tokens(tokenize(data, ByteTokenizer(), tmp_path / "cache", labels=names))


def test_classes_are_numbers_or_names(tmp_path: Path):
    items = [{"text": "a", "label": 2}, {"text": "b", "label": "good"}]
    tokens = labelled(tmp_path, *items, names={"bad": 0, "good": 1, "fair": 2}, objective="classification")
    assert [int(tokens.more["label"].row(i)[0]) for i in range(2)] == [2, 1] and tokens.largest_label == 2


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"text": "a", "label": "odd"}, 'line 1: "odd" is no label; the labels are bad, good. Set data.labels, or'),
        ({"text": "a", "label": 7}, "line 1: 7 is no label"),
        ({"text": "a"}, "line 1: there is no label under the key 'label'; its keys are text. Set data.target, or"),
    ],
)
def test_a_label_that_is_none_is_named(tmp_path: Path, item: dict, message: str):
    with pytest.raises(ConfigError) as caught:
        labelled(tmp_path, item, names={"bad": 0, "good": 1}, objective="classification")
    assert message in str(caught.value)


def test_tags_stand_at_the_first_token_of_their_words(tmp_path: Path):
    tokens = labelled(tmp_path, {"tokens": ["ab", "c", "dé"], "tags": [1, 0, 2]}, objective="tagging")
    assert bytes(tokens.row(0).astype(np.uint8)).decode() == "ab c dé"
    assert tokens.more["tags"].row(0).tolist() == [1, -100, -100, 0, -100, 2, -100, -100]


def test_as_many_tags_as_words_are_needed(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"line 1: 2 words, but 1 tags"):
        labelled(tmp_path, {"tokens": ["a", "b"], "tags": [1]}, objective="tagging")


def test_tags_follow_words_through_a_tokenizer_that_joins_spaces_and_words(tmp_path: Path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate([*alphabet, "Ġc", "ab"])}
    inner = Tokenizer(models.BPE(vocab=words, merges=[("Ġ", "c"), ("a", "b")]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path / "tokenizer")
    data = Data(path=write_lines(tmp_path / "a.jsonl", {"tokens": ["ab", "c", "d"], "tags": [5, 6, 7]}),
                objective="tagging", tokenizer=str(tmp_path / "tokenizer"))  # fmt: skip
    tokens = open_tokens(tokenize(data, open_tokenizer(data, tmp_path), tmp_path / "cache"))
    assert tokens.row(0).tolist() == [257, 256, words["Ġ"], words["d"]]
    assert tokens.more["tags"].row(0).tolist() == [5, 6, -100, 7]


def test_words_begin_after_spaces_and_where_the_tokenizer_says(tmp_path: Path):
    (tmp_path / "a.txt").write_text("ab c\nd")
    tokens = tokens_of(tmp_path, path=str(tmp_path / "a.txt"), whole_words=True, objective="masked")
    assert tokens.more["begins"].values.tolist() == [1, 0, 1, 1, 1, 1, 1]


# -- the section itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "one of path, hub, sources and dataset is needed, none given"),
        ({"path": "a", "hub": "b"}, "one of path, hub, sources and dataset is needed, path and hub given"),
        ({"sources": [{"weight": 2}]}, "a source has either a path or a hub"),
        ({"path": "a", "eval": {"every": 5}}, "one of path, hub, dataset and fraction is needed"),
        ({"sources": [{"path": "a", "weigh": 2}]}, r"data\.sources\.0\.weigh is not a key\. Did you mean .*weight"),
        ({"path": "a", "eval": {"fractoin": 2}}, r"data\.eval\.fractoin is not a key\. Did you mean .*fraction"),
    ],
)
def test_a_section_that_does_not_say_where_the_data_is_is_an_error(given: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        make_config({"data": given})


def test_overrides_reach_sections_within_sections():
    assert apply_overrides({"data": {"path": "a"}}, ["data.eval.fraction=0.1"])["data"]["eval"] == {"fraction": 0.1}


# -- what files are like in the world -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw", [b'{"text": "a \\ud800 b"}\n', b"[" * 100_000 + b"\n", b'{"text": NaN}\n'], ids=["half", "deep", "nan"]
)
def test_what_json_can_spell_and_no_tokenizer_can_read_is_a_bad_line(tmp_path: Path, raw: bytes):
    (tmp_path / "a.jsonl").write_bytes(raw + b'{"text": "b"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: "):
        tokens_of(tmp_path, path=str(tmp_path / "a.jsonl"))
    assert tokens_of(tmp_path, path=str(tmp_path / "a.jsonl"), on_bad_line="skip").ids.tolist() == [98, 256]


@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL"])
def test_the_mark_at_the_beginning_of_a_file_is_no_text(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfc")
    assert tokens_of(tmp_path, path=[str(tmp_path / name), str(tmp_path / "b.txt")]).ids.tolist() == [
        97, 256, 98, 256, 99, 256,
    ]  # fmt: skip


def test_one_json_value_over_many_lines_says_how_it_is_written(tmp_path: Path):
    (tmp_path / "a.json").write_text('[\n{"text": "a"}\n]\n')
    with pytest.raises(ConfigError, match=r"a\.json, line 1: not JSON .* Write each example on a line of its own, or"):
        tokens_of(tmp_path, path=str(tmp_path / "a.json"))


def test_a_table_is_not_taken_for_text_unless_that_is_said(tmp_path: Path):
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(ConfigError, match=r"a\.csv: \.csv files are not read\. Make it JSONL or Parquet, or set"):
        tokens_of(tmp_path, path=str(tmp_path / "a.csv"))
    assert tokens_of(tmp_path, path=str(tmp_path / "a.csv"), format="text").ids.tolist() == [97, 44, 98, 256]


def test_columns_that_nobody_asked_for_are_not_read(tmp_path: Path):
    beyond = pyarrow.array([2**62], pyarrow.timestamp("us"))  # which Python has no date for
    write_parquet(tmp_path / "a.parquet", m=[{"text": "ab"}], when=beyond, label=[1])
    tokens = tokens_of(tmp_path, path=str(tmp_path), field="m.text", objective="classification")
    assert tokens.row(0).tolist() == [97, 98] and tokens.more["label"].row(0).tolist() == [1]
