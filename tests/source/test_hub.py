"""Models named by a hub id, with a stand-in for the hub: what is fetched, what is kept, and what can go wrong."""

import json
import os
import subprocess
import sys

import pytest

from tests.source.hub_server import COMMIT, serving
from tpconvert.errors import SourceError
from tpconvert.source.huggingface.hub import find_home, weight_files

NAME = "owner/model"


@pytest.fixture
def hub(llama, tmp_path, monkeypatch):
    from huggingface_hub import constants

    with serving() as hub:
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        hub.files[NAME] = {path.name: path.read_bytes() for path in llama.iterdir()}
        yield hub


def offline(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_only_what_planning_needs_is_fetched_at_first(hub):
    hub.files[NAME] |= {
        "onnx/config.json": b"{}",
        "tf_model.h5": b"x",
        "README.md": b"x",
        "1_Pooling/config.json": b"{}",
    }
    home = find_home(NAME, None)
    assert home.revision == COMMIT
    assert sorted(hub.sent) == ["1_Pooling/config.json", "config.json", "generation_config.json"]


def test_weights_are_fetched_once_and_lie_in_the_cache_of_huggingface_hub(hub):
    first = find_home(NAME, None).with_weights()
    assert hub.sent.count("model.safetensors") == 1
    assert find_home(NAME, None).with_weights() == first
    assert hub.sent.count("model.safetensors") == 1
    assert (first / "model.safetensors").read_bytes() == hub.files[NAME]["model.safetensors"]
    assert first.parts[-3:] == ("models--owner--model", "snapshots", COMMIT)


def test_safetensors_are_taken_rather_than_pickles_and_other_copies(hub):
    hub.files[NAME] |= {"pytorch_model.bin": b"x", "consolidated.safetensors": b"x", "model.fp16.safetensors": b"x"}
    folder = find_home(NAME, None).with_weights()
    assert [n for n in hub.sent if not n.endswith(".json")] == ["model.safetensors"]
    assert not (folder / "pytorch_model.bin").exists()


def test_an_index_names_the_files(hub):
    weights = hub.files[NAME].pop("model.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    hub.files[NAME] |= {name: weights + name.encode() for name in [*index["weight_map"].values(), "other.safetensors"]}
    hub.files[NAME]["model.safetensors.index.json"] = json.dumps(index).encode()
    find_home(NAME, None).with_weights()
    assert sorted(n for n in hub.sent if n.endswith(".safetensors")) == sorted(index["weight_map"].values())


def test_pickles_are_fetched_where_there_is_nothing_else(hub):
    del hub.files[NAME]["model.safetensors"]
    hub.files[NAME] |= {"pytorch_model.bin": b"x", "training_args.bin": b"x", "optimizer.pt": b"x"}
    find_home(NAME, None).with_weights()
    assert [n for n in hub.sent if not n.endswith(".json")] == ["pytorch_model.bin"]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ([], []),
        (["onnx/model.safetensors", "tf_model.h5"], []),
        (["b.safetensors", "a.safetensors", "pytorch_model.bin"], ["a.safetensors", "b.safetensors"]),
        (["optimizer.pt", "rng_state_0.pth", "weights.pt"], ["weights.pt"]),
    ],
)
def test_which_files_are_the_weights(tmp_path, names, wanted):
    assert weight_files(names, tmp_path) == wanted


def test_a_damaged_index_is_one_line(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("[")
    with pytest.raises(SourceError, match=r"the index of the weights cannot be read"):
        weight_files(["model.safetensors.index.json"], tmp_path)


def test_a_revision_is_asked_for(hub):
    assert find_home(NAME, "v1").revision == COMMIT
    with pytest.raises(SourceError, match=r"^owner/model has no revision 'v2' on the Hugging Face hub\.$"):
        find_home(NAME, "v2")


def test_a_model_that_is_not_there_is_one_line(hub):
    with pytest.raises(SourceError, match=r"^owner/none is neither a folder nor a model on the Hugging Face hub"):
        find_home("owner/none", None)


def test_a_gated_model_says_how_to_get_at_it(hub):
    hub.gated.add(NAME)
    with pytest.raises(
        SourceError, match=r"is gated on the Hugging Face hub\. Ask for access there, then: hf auth login"
    ):
        find_home(NAME, None)


def test_a_model_without_a_config_says_what_it_is(hub):
    del hub.files[NAME]["config.json"]
    hub.files[NAME]["adapter_config.json"] = b'{"base_model_name_or_path": "owner/base"}'
    with pytest.raises(SourceError, match=r"no config\.json .* an adapter of owner/base"):
        find_home(NAME, None)


def test_a_model_without_weights_is_one_line(hub):
    del hub.files[NAME]["model.safetensors"]
    with pytest.raises(SourceError, match=r"holds no weights as safetensors"):
        find_home(NAME, None).with_weights()


def test_what_is_in_the_cache_needs_no_hub(hub, monkeypatch):
    find_home(NAME, None).with_weights()
    sent = len(hub.sent)
    offline(monkeypatch)
    assert (find_home(NAME, None).with_weights() / "model.safetensors").is_file()
    assert len(hub.sent) == sent


def test_offline_without_a_cache_says_so(hub, monkeypatch):
    offline(monkeypatch)
    with pytest.raises(SourceError, match=r"nor in the Hugging Face cache, and HF_HUB_OFFLINE is set"):
        find_home(NAME, None)


def test_offline_with_the_configuration_alone_says_what_is_missing(hub, monkeypatch):
    home = find_home(NAME, None)
    offline(monkeypatch)
    find_home(NAME, None)  # planning goes on
    with pytest.raises(
        SourceError, match=r"^No weights of owner/model are in the Hugging Face cache, and HF_HUB_OFFLINE is set"
    ):
        home.with_weights()


def test_offline_with_half_of_the_files_says_what_is_missing(hub, monkeypatch):
    weights = hub.files[NAME].pop("model.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    hub.files[NAME] |= {name: weights + name.encode() for name in index["weight_map"].values()}
    hub.files[NAME]["model.safetensors.index.json"] = json.dumps(index).encode()
    home = find_home(NAME, None)
    folder = home.with_weights()
    (folder / "model-2.safetensors").unlink()
    offline(monkeypatch)
    with pytest.raises(
        SourceError, match=r"^owner/model is only partly in the Hugging Face cache, and HF_HUB_OFFLINE is set"
    ):
        home.with_weights()


def test_a_hub_that_is_down_is_told_apart_from_a_wrong_name(hub):
    hub.down = True
    with pytest.raises(SourceError, match=r"the hub cannot be reached"):
        find_home(NAME, None)


def test_a_download_that_breaks_off_is_one_line_and_goes_on_the_next_time(hub):
    home = find_home(NAME, None)
    hub.broken.add("model.safetensors")
    with pytest.raises(SourceError, match=r"could not be fetched from the Hugging Face hub"):
        home.with_weights()
    assert not (home.folder / "model.safetensors").exists()
    hub.broken.clear()
    assert (home.with_weights() / "model.safetensors").read_bytes() == hub.files[NAME]["model.safetensors"]


def test_a_full_disk_is_not_taken_for_a_missing_network(hub, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(OSError, match=r"No space left"):
        find_home(NAME, None)


def test_a_revision_of_a_folder_is_refused(llama):
    with pytest.raises(SourceError, match=r"--revision is for ids on the Hugging Face hub"):
        find_home(str(llama), "main")


def test_the_command_fetches_a_model_and_cuts_it(hub, llama, tmp_path):
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | settings
    command = [
        sys.executable,
        "-m",
        "tpconvert",
        "shard",
        NAME,
        "--revision",
        "v1",
        "--tp",
        "2",
        "-o",
        tmp_path / "cut",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "cut/manifest.json").read_text())
    assert manifest["source"]["name"] == NAME
    plan = json.loads((tmp_path / "cut/plan.json").read_text())
    assert plan["source"]["revision"] == COMMIT
