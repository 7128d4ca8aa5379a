import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from tpconvert.errors import ConfigError
from tpconvert.train.settings.config import Training, accumulation, apply_overrides, load_config, make_config, schema

SMALL = {"data": {"path": "corpus.txt"}}


def test_two_lines_are_a_whole_configuration():
    config = make_config(SMALL)
    assert config.data.path == ("corpus.txt",)
    assert config.training.precision == "bf16" and config.training.clip == 1.0


def test_an_unknown_key_says_which_was_meant():
    with pytest.raises(
        ConfigError, match=r"c\.yaml: training\.seq_length is not a key\. Did you mean training\.seq_len\?"
    ):
        make_config(SMALL | {"training": {"seq_length": 3}}, where="c.yaml")


def test_a_key_in_the_wrong_section_says_where_it_belongs():
    with pytest.raises(ConfigError, match=r"data\.seed is not a key\. Did you mean training\.seed\?"):
        make_config({"data": {"path": "x", "seed": 3}})
    with pytest.raises(ConfigError, match=r"lr is not a key\. Did you mean training\.lr\?"):
        make_config(SMALL | {"lr": 3})


def test_an_unknown_section_says_which_was_meant():
    with pytest.raises(ConfigError, match=r"trainig is not a key\. Did you mean training\?"):
        make_config(SMALL | {"trainig": {}})


def test_every_mistake_is_named_in_one_line():
    with pytest.raises(ConfigError) as caught:
        make_config({"training": {"lr": -1, "precision": "fp17"}})
    text = str(caught.value)
    assert "training.lr is -1, but it should be greater than 0" in text
    assert "training.precision is 'fp17', but it should be 'bf16', 'fp16', 'fp32', 'fp64' or 'fp8'" in text
    assert "data is missing" in text
    assert "\n" not in text
    with pytest.raises(ConfigError, match=r"data is 3, but it should be a section of keys\.$"):
        make_config({"data": 3})


def test_warmup_longer_than_the_run_is_an_error():
    with pytest.raises(ConfigError, match="warmup_steps 9 is more than steps 5"):
        make_config(SMALL | {"training": {"steps": 5, "warmup_steps": 9}})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("learning_rate", r"training\.learning_rate is not a key\. That is training\.lr here\."),
        ("num_train_epochs", r"That is training\.epochs here\."),
        ("tp", r"training\.tp is not a key\. Leave it out: the sharded folder says it"),
        ("zebra", r"training\.zebra is not a key\.$"),
    ],
)
def test_a_word_of_another_trainer_is_translated(key: str, message: str):
    with pytest.raises(ConfigError, match=message):
        make_config(SMALL | {"training": {key: 1}})


def test_every_word_of_another_trainer_leads_to_a_key():
    from tpconvert.train.settings.config import _keys
    from tpconvert.train.settings.foreign import FOREIGN

    assert not FOREIGN.keys() - {path for path, _ in _keys()}
    words = [word for text in FOREIGN.values() for word in text.split()]
    assert len(words) == len(set(words))


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("training", "lr", float("inf"), "training.lr is inf, but it should be a finite number"),
        ("training", "betas", [0.9, 1.5], "training.betas.1 is 1.5, but it should be less than 1"),
        ("training", "betas", 0.9, "training.betas is 0.9, but it should be a list"),
        ("training", "seed", 2**32, "training.seed is 4294967296, but it should be less than 4294967296"),
        ("training", "micro_batch_size", True, "training.micro_batch_size: true is no number"),
        ("parallelism", "bucket_mb", float("inf"), "parallelism.bucket_mb is inf, but it should be a finite number"),
        ("data", "sources", [{"path": "x", "weight": float("inf")}], "data.sources.0.weight is inf, but it should be"),
    ],
)
def test_a_number_that_no_run_could_use_is_refused(section: str, key: str, value, message: str):
    with pytest.raises(ConfigError) as caught:
        make_config({**SMALL, section: {**SMALL.get(section, {}), key: value}})
    assert message in str(caught.value)


def test_epochs_stand_in_place_of_steps():
    config = make_config(SMALL | {"training": {"epochs": 3, "warmup_steps": 2000}})
    assert "steps: " not in config.to_yaml().replace("warmup_steps: ", "").split("data:")[0].replace("profile", "")
    assert make_config(yaml.safe_load(config.to_yaml())) == config
    assert config.with_steps(2500).training.steps == 2500 and config.with_steps(2500).training.epochs is None
    with pytest.raises(ConfigError, match=r"training\.epochs: training: warmup_steps 2000 is more than steps 30\."):
        config.with_steps(30)
    with pytest.raises(ConfigError, match="steps and epochs are both set; leave one out"):
        make_config(SMALL | {"training": {"epochs": 3, "steps": 10}})


def test_overrides_win_over_the_file(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("training: {lr: 3e-4, steps: 5}\ndata: {path: a.txt}\n")
    config = load_config(
        file, ["training.lr=1e-3", "data.path=[b.txt, c.txt]", "training.clip=null", "logging.every=2"]
    )
    assert (config.training.lr, config.training.steps, config.training.clip) == (1e-3, 5, None)
    assert config.data.path == ("b.txt", "c.txt") and config.logging.every == 2


def test_an_override_without_a_section_says_how_it_is_written():
    with pytest.raises(ConfigError, match=r"lr=3: an override is written section\.key=value\."):
        apply_overrides(SMALL, ["lr=3"])


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("training=3", r"training is a section, as in training\.steps=\.\.\.$"),
        ("training.lr", r"Write training\.lr=VALUE\.$"),
        ("learning_rate=3", r"That is training\.lr here\.$"),
    ],
)
def test_an_override_that_is_none_says_what_to_write(item: str, message: str):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(SMALL, [item])


def test_a_mistaken_override_says_which_key_was_meant(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("data: {path: a.txt}\n")
    with pytest.raises(ConfigError, match=r"training\.stesp is not a key\. Did you mean training\.steps\?"):
        load_config(file, ["training.stesp=3"])


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "not YAML"), ("- a", "a mapping of sections is needed, but this is a list"), (None, "cannot be read")],
)
def test_a_file_that_is_no_configuration_is_one_line(tmp_path: Path, text: str | None, message: str):
    file = tmp_path / "c.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(file)
    assert "\n" not in str(caught.value)


def test_the_printed_configuration_reads_back_as_itself():
    config = make_config(SMALL | {"training": {"lr": 1e-5, "betas": [0.8, 0.9]}})
    assert make_config(yaml.safe_load(config.to_yaml())) == config


def test_accumulation_follows_from_the_global_batch():
    training = Training(micro_batch_size=2, global_batch_size=16)
    assert accumulation(training, dp=4) == 2
    assert accumulation(Training(micro_batch_size=2), dp=4) == 1


def test_a_global_batch_that_does_not_divide_is_an_error_with_the_numbers():
    with pytest.raises(
        ConfigError, match=r"global_batch_size 10 is not a multiple of micro_batch_size 2 x dp 4 = 8\. Use 8 or 16\."
    ):
        accumulation(Training(micro_batch_size=2, global_batch_size=10), dp=4)


SCHEMA = Path(__file__).parents[2] / "docs/schemas/train-config.schema.json"


def test_the_schema_for_editors_is_that_of_the_code():
    assert json.loads(SCHEMA.read_text()) == schema(), f"Run: python -m tpconvert.train.settings.config {SCHEMA}"


def test_the_schema_knows_the_keys_and_what_they_mean():
    check = jsonschema.Draft202012Validator(schema())
    assert check.is_valid(SMALL | {"training": {"lr": 1e-3}}) and check.is_valid({"data": {"path": ["a", "b"]}})
    assert not check.is_valid(SMALL | {"training": {"lrr": 1}}) and not check.is_valid({})
    texts = [p for d in schema()["$defs"].values() for p in d["properties"].values() if "description" in p]
    assert len(texts) > 20


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"pp": 2}, r"parallelism: pp is 2, but the trainer has no pipeline stages; use more tp, or fsdp over dp"),
        ({"cpu_offload": True}, r"parallelism: cpu_offload needs data_parallel: fsdp"),
    ],
)
def test_what_cannot_be_had_together_says_so(section: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        make_config(SMALL | {"parallelism": section})


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_the_examples_are_configurations(path: Path):
    assert load_config(path).training.steps > 0
    jsonschema.validate(yaml.safe_load(path.read_text()), schema())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty. Say where the text is, as in data: {path: corpus.txt}."),
        ("# data: {path: x}", "is empty. Say where the text is"),
        ("training: {}", "data is missing. Say where the text is, as in data: {path: corpus.txt}."),
        ("x", "a mapping of sections is needed, but this is a text."),
        ("data: {path: a}\ndata: {path: b}", "not YAML: the key data occurs twice (line 2, column 1)."),
        ("data: {path: a}\ntraining: {lr: 1, lr: 2}", "the key lr occurs twice (line 2, column 19)."),
        ("data: {path: a}\ntraining: {steps: 1:30}", "training.steps is '1:30', but it should be a valid integer"),
        ("data: {path: a}\ntraining:", "training is null, but it should be a section of keys."),
        ("a: b: c", "not YAML: mapping values are not allowed here (line 1, column 5)."),
        ("data: {path: ''}", "data.path: an empty text; leave it out."),
        ("data: {path: [a, '']}", "data.path: an empty text; leave it out."),
        ("data: {path: a, loss: ''}", "data.loss: an empty text; leave it out."),
        ("data: {path: a, labels: [x, y, x]}", "data: labels has 'x' twice."),
        (
            "data: {path: a, eval: {path: b, fraction: 0.1}}",
            "data.eval: one of path, hub, dataset and fraction is needed, path and fraction given.",
        ),
        ("data: {path: a}\ncheckpoint: {keep_best: true}", "c.yaml: checkpoint.keep_best needs a held-out set"),
    ],
)
def test_a_file_that_is_no_configuration_says_what_to_write(tmp_path: Path, text: str, told: str):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "c.yaml")
    assert str(caught.value).startswith(f"{tmp_path}/c.yaml: ")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("010", 10), ("1e3", 1000), ("1_000", 1000), ("0x10", 16), ("+7", 7), ("'12'", 12), ("10.0", 10)],
)
def test_numbers_are_read_as_people_write_them(tmp_path: Path, text: str, value: int):
    (tmp_path / "c.yaml").write_text(
        f"data: {{path: a}}\ntraining: {{steps: {text}, lr: 3e-4, min_lr: .0, eps: 1.e-8}}"
    )
    training = load_config(tmp_path / "c.yaml").training
    assert (training.steps, training.lr, training.min_lr, training.eps) == (value, 3e-4, 0.0, 1e-8)


def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file_alone(tmp_path: Path):
    (tmp_path / "c.yaml").write_text("data: {path: a}")
    with pytest.raises(ConfigError, match=r"c\.yaml and the command line: training\.lr is 'x'"):
        load_config(tmp_path / "c.yaml", ["training.lr=x"])
