"""Folders at URLs: fetched once, sent when complete, and what says that one is whole comes last."""

import errno

import fsspec
import pytest
from click.testing import CliRunner

from tests.checkpoint.frame import hashes
from tpconvert.checkpoint.files.remote import fetch_folder, output_folder
from tpconvert.cli import main
from tpconvert.errors import CheckpointError
from tpconvert.source.huggingface.hub import find_home


@pytest.fixture
def store(monkeypatch, tmp_path):
    """An empty store in memory, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def put(store, folder, at):
    for path in folder.rglob("*"):
        if path.is_file():
            store.pipe_file(f"{at}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def names(store, at):
    return sorted(path.removeprefix(f"/{at}/") for path in store.find(f"/{at}"))


def run(*args):
    return CliRunner().invoke(main, [str(a) for a in args])


def ok(*args):
    result = run(*args)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def test_a_model_at_a_url_goes_all_the_way_round(store, llama, tmp_path):
    put(store, llama, "models/llama")
    ok("shard", "memory://models/llama", "--tp", 2, "-o", "memory://cut")
    assert "manifest.json" in names(store, "cut")
    assert "Every byte is as it was written" in ok("inspect", "memory://cut", "--check").stderr
    ok("reshard", "memory://cut", "--tp", 1, "-o", "memory://one")
    ok("merge", "memory://one", "--check", "-o", "memory://back")
    assert hashes(fetch_folder("memory://back")) == hashes(llama)
    ok("merge", "memory://one", "-o", tmp_path / "here")
    assert hashes(tmp_path / "here") == hashes(llama)


def test_what_has_not_changed_is_fetched_once(store, monkeypatch):
    fetched, get = [], store.get_file
    monkeypatch.setattr(type(store), "get_file", lambda self, path, *more: (fetched.append(path), get(path, *more)))
    store.pipe({"/m/a": b"1", "/m/sub/b": b"2"})
    place = fetch_folder("memory://m")
    assert (place / "sub/b").read_bytes() == b"2"
    fetch_folder("memory://m/")
    fetched.clear()
    fetch_folder("memory://m/")
    assert fetched == []
    store.pipe_file("/m/a", b"3")
    store.rm_file("/m/sub/b")
    assert {name: (place / name).read_bytes() for name in hashes(fetch_folder("memory://m"))} == {"a": b"3"}
    assert fetched == ["/m/a"]


def test_a_folder_that_exists_is_not_replaced_unasked(store):
    store.pipe({"/out/manifest.json": b"{}", "/out/rank/old": b"", "/other/notes.txt": b""})
    for url, force, text in (("out", False, "exists already"), ("other", True, "is no checkpoint")):
        with (
            pytest.raises(CheckpointError, match=f"memory://{url}: {text}"),
            output_folder(f"memory://{url}", force=force),
        ):
            raise AssertionError
    assert names(store, "out") == ["manifest.json", "rank/old"]


@pytest.mark.parametrize("last", ["manifest.json", "config.json"])
def test_the_file_that_makes_it_whole_goes_first_and_comes_last(store, monkeypatch, last):
    store.pipe({f"/out/{last}": b"{}", "/out/a": b"", "/out/z.safetensors": b""})
    steps = []
    for call in ("rm_file", "put_file"):
        real = getattr(type(store), call)

        def noted(self, *args, real=real, call=call):
            steps.append((call, args[-1].rpartition("/")[2]))
            return real(self, *args)

        monkeypatch.setattr(type(store), call, noted)
    with output_folder("memory://out", force=True) as place:
        place.mkdir()
        for name in ("b", last, "z.safetensors"):
            (place / name).write_text(name)
    assert next(name for call, name in steps if call == "rm_file") == last
    assert steps[-1] == ("put_file", last)
    assert names(store, "out") == sorted(["b", last, "z.safetensors"])


def test_what_fails_before_it_is_complete_sends_nothing(store):
    with pytest.raises(ZeroDivisionError), output_folder("memory://out") as place:
        place.mkdir()
        (place / "manifest.json").write_text("{}")
        raise ZeroDivisionError
    assert names(store, "out") == []


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("memory://none", "there is no such folder, or it is empty"),
        ("nonsense://x", "Protocol not known"),
        ("file:///nowhere/at/all", "there is no such folder, or it is empty"),
    ],
)
def test_a_url_with_nothing_is_one_line(store, url, text):
    with pytest.raises(CheckpointError, match=text) as caught:
        fetch_folder(url)
    assert url in str(caught.value) and "\n" not in str(caught.value)
    result = run("inspect", url)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {url}: ")


def test_the_name_of_a_model_stays_its_url(store, llama):
    put(store, llama, "m")
    home = find_home("memory://m", None)
    assert home.name == "memory://m" and home.has_weights
    assert hashes(home.folder) == hashes(llama)


def test_a_file_of_the_store_that_leads_out_of_the_folder_is_refused(store):
    store.pipe({"/m/../../x": b"1"})
    with pytest.raises(CheckpointError, match="outside its folder: refused"):
        fetch_folder("memory://m")


def test_a_plan_and_a_run_are_of_this_machine(store, llama):
    for args in (["plan", llama, "--tp", "2", "-o", "memory://p"], ["train", "memory://cut", "--config", "c.yaml"]):
        result = run(*args)
        assert result.exit_code == 2 and "is a URL; here only a path of this machine will do" in result.stderr


def test_what_a_full_store_took_of_a_folder_is_removed_again(store, sharded, monkeypatch):
    real, left = type(store).put_file, [2]

    def full(self, *args, **options):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device", "x")
        return real(self, *args, **options)

    monkeypatch.setattr(type(store), "put_file", full)
    result = run("merge", sharded, "-o", "memory://whole")
    assert result.exit_code == 2 and result.stderr == "error: memory://whole: No space left on device.\n"
    assert store.find("/whole") == []
