"""A checkpoint in an S3 store, served on loopback."""

import hashlib

import pytest
import s3fs
from click.testing import CliRunner
from moto.server import ThreadedMotoServer

from tpconvert.cli import main


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """An empty bucket of a server of our own."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    system.mkdir("bucket")
    yield system
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def run(*args):
    return CliRunner().invoke(main, [str(a) for a in args])


def held(bucket, folder):
    bucket.invalidate_cache()
    found = bucket.find(f"bucket/{folder}")
    return {path.removeprefix(f"bucket/{folder}/"): hashlib.sha256(bucket.cat(path)).hexdigest() for path in found}


def test_a_model_goes_all_the_way_round_and_each_fault_is_one_line(bucket, llama):
    bucket.put(f"{llama}/", "bucket/llama", recursive=True)
    for command in (
        ("shard", "s3://bucket/llama", "--tp", 2, "-o", "s3://bucket/cut"),
        ("inspect", "s3://bucket/cut", "--check"),
        ("reshard", "s3://bucket/cut", "--tp", 1, "-o", "s3://bucket/one"),
        ("merge", "s3://bucket/one", "--check", "-o", "s3://bucket/back"),
        ("shard", "s3://bucket/llama", "--tp", 1, "-o", "s3://bucket/cut", "--force"),
    ):
        result = run(*command)
        assert result.exit_code == 0, (command, result.output, result.exception)
    assert held(bucket, "back") == held(bucket, "llama")
    assert [name for name in held(bucket, "cut") if "rank-" in name] == ["rank-00000-of-00001/model.safetensors"]

    for command, text in (
        (
            ("shard", "s3://bucket/none", "--tp", 2, "-o", "s3://bucket/new"),
            "s3://bucket/none: there is no such folder",
        ),
        (("shard", "s3://none/x", "--tp", 2, "-o", "s3://bucket/new"), "s3://none/x: The specified bucket does not"),
        (("shard", "s3://bucket/llama", "--tp", 2, "-o", "s3://none/x"), "s3://none/x: The specified bucket does not"),
        (("shard", "s3://bucket/llama", "--tp", 2, "-o", "s3://bucket/cut"), "s3://bucket/cut: exists already."),
    ):
        result = run(*command)
        assert result.exit_code == 2 and result.stderr.startswith(f"error: {text}"), result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert held(bucket, "new") == {}
