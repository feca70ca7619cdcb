"""Models elsewhere: in buckets of a local S3 server, and on a local hub; and what tells one folder from another."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import md5, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from isobatch.cluster.serving.serve_file import ROOT, serve_file
from isobatch.deployments.folders import content_of
from isobatch.deployments.models.checkpoint import locate
from isobatch.deployments.sources import fetched, local, name_of, pinned, remote_of, title_of
from isobatch.profiles.errors import UserError

BUCKET, URL = "models", "s3://models/my-bert"
CONFIG = json.dumps({"model_type": "bert", "vocab_size": 9}).encode()
FILES = {
    "config.json": CONFIG,
    "model.safetensors": bytes(range(256)) * 33_000,  # above one part of a download
    "level-0/config.json": b"{}",
    "pytorch_model.bin": b"a pickle",
    "onnx/model.json": b"{}",
    ".hidden.json": b"{}",
}


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """A client of an S3 server with an empty bucket."""
    import boto3
    from botocore.loaders import create_loader
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setattr("botocore.session.create_loader", cache(create_loader))  # what it knows of all services is long
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        yield client
    server.stop()


@pytest.fixture
def bucket(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, with a model in the bucket, and an empty cache here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wanted = {f"my-bert/{name}": content for name, content in FILES.items()}
    wanted["my-bert-large/config.json"] = b"{}"  # another model, whose name begins alike
    there = {each["Key"]: each["ETag"] for each in store.list_objects_v2(Bucket=BUCKET).get("Contents", ())}
    for key in there.keys() - wanted.keys():
        store.delete_object(Bucket=BUCKET, Key=key)
    for key, content in wanted.items():
        if there.get(key) != f'"{md5(content).hexdigest()}"':  # weights are long: they are sent once
            store.put_object(Bucket=BUCKET, Key=key, Body=content)
    fetched.cache_clear()
    return store


def put(store: Any, folder: str, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        store.put_object(Bucket=BUCKET, Key=f"{folder}/{name}", Body=content)


def downloads(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The requests for files that the server has answered."""
    return [line for line in caplog.messages if f"GET /{BUCKET}/" in line]


def test_a_model_in_a_bucket_is_a_directory_here_without_pickles(bucket: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "werkzeug")
    folder = locate(URL)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {"config.json", "model.safetensors", "level-0/config.json", "SHA256SUMS"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert name_of(URL) == folder.name == "my-bert"
    came = len(downloads(caplog))
    fetched.cache_clear()  # as another process begins
    assert local(pinned(URL)) == local(URL + "/") == folder
    assert local(f"{pinned(URL)}/config.json") == folder / "config.json"
    assert len(downloads(caplog)) == came
    assert not [path for path in folder.parent.iterdir() if path.is_dir() and path != folder]  # no draft stays


def test_processes_that_want_it_at_the_same_time_fetch_it_once(bucket: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "werkzeug")
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(local, [URL] * 4))
    assert len(folders) == 1
    assert len([line for line in downloads(caplog) if "level-0/config.json" in line]) == 1


def test_what_was_damaged_in_the_cache_is_fetched_again(bucket: Any) -> None:
    url = pinned(URL)
    weights = local(url) / "model.safetensors"
    weights.write_bytes(FILES["model.safetensors"][:-1] + b"x")
    fetched.cache_clear()
    assert (local(url) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_revision_is_what_it_was(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pinned(URL)
    put(bucket, "my-bert", {"config.json": CONFIG + b" "})
    fetched.cache_clear()
    second = pinned(URL)
    assert second != first
    assert (local(first) / "config.json").read_bytes() == CONFIG  # of the cache
    wrong = f"{URL}@{'0' * 16}"
    with pytest.raises(UserError, match=rf"its checksum differs: {'0' * 16} is wanted, and {second[-16:]} lies there"):
        local(wrong)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fetched.cache_clear()
    assert (local(second) / "config.json").read_bytes() == CONFIG + b" "
    with pytest.raises(UserError, match=rf"{URL}: cannot be fetched: Could not connect to the endpoint"):
        local(URL)


def test_nothing_is_written_outside_of_the_folder(bucket: Any, tmp_path: Path) -> None:
    put(bucket, "my-bert", {"../../../evil.json": b"{}"})
    with pytest.raises(UserError, match=r"'models/my-bert/../../../evil.json' would be outside of its folder"):
        local(URL)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://nowhere/my-bert", "there is no such bucket, or no model in that folder"),
        ("s3://models/my-gpt", "there is no such bucket, or no model in that folder"),
        ("s3://models", "names no folder of a bucket; write s3://BUCKET/FOLDER"),
        ("s3://models/my-bert/config.json", "is a file; give the folder of a model"),
        ("ftp://models/my-bert", "is not the URL of a model; write hf://ORG/NAME"),
        ("file://models/my-bert", "the directory must be absolute, as in file:///models/my-bert"),
        ("file:///models/my-bert", "no such directory"),
        ("gs://models/my-bert", "needs the extra .gs.: pip install 'isobatch.gs.'"),
        ("./models/my-bert", "no such directory"),
    ],
)
def test_each_error_is_a_sentence(bucket: Any, url: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=problem) as raised:
        locate(url)
    assert str(raised.value).startswith(url)
    assert "\n" not in str(raised.value)


def test_without_credentials_it_is_said(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_") and "KEY" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=f"{URL}: cannot be fetched: Unable to locate credentials"):
        local(URL)


def test_a_directory_may_be_a_url(tmp_path: Path) -> None:
    assert local(f"file://{tmp_path}/my%20bert") == tmp_path / "my bert"
    assert title_of(f"file://{tmp_path}") == tmp_path.name
    assert remote_of(str(tmp_path)) is None


@pytest.mark.parametrize("model", [".", "..", "../my-bert"])
def test_a_directory_has_a_name_by_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    (tmp_path / "my-bert" / "runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "my-bert" / ("runs" if model == ".." else ""))
    assert (name_of(model), title_of(model)) == ("my-bert", "my-bert")


def test_what_is_served_is_pinned_by_its_plan_or_now(bucket: Any, tmp_path: Path) -> None:
    (served,) = serve_file(URL, {})["applications"]
    assert served["args"] == {"model": pinned(URL)}
    file = tmp_path / "serve.yaml"
    file.write_text(f"applications:\n- import_path: isobatch.deployments.app:build\n  args: {{model: {URL}}}\n")
    assert serve_file(str(file), {})["applications"][0]["args"] == {"model": pinned(URL)}

    first = pinned(URL)
    profile = tmp_path / "profile.json"
    profile.write_text(
        json.dumps(json.loads((ROOT / "cluster" / "demo" / "profile.json").read_text()) | {"model": first})
    )
    put(bucket, "my-bert", {"config.json": CONFIG + b" "})
    fetched.cache_clear()
    overrides = {"profile": str(profile), "backend": "virtual"}
    assert serve_file(URL, overrides)["applications"][0]["args"]["model"] == first
    assert serve_file(URL, {})["applications"][0]["args"]["model"] == pinned(URL) != first


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of the hub, for one model."""

    commit, files = "c" * 40, {"config.json": CONFIG, "model.safetensors": b"weights", "pytorch_model.bin": b"a pickle"}

    def do_HEAD(self) -> None:
        self._answer(b"" if "/resolve/" in self.path else None)

    def do_GET(self) -> None:
        about = "/api/models/me/my-bert"
        if self.path.startswith(f"{about}/revision/v9"):
            self._answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        elif self.path.startswith(f"{about}/revision/"):
            self._answer(json.dumps({"id": "me/my-bert", "sha": self.commit}).encode())
        elif self.path.startswith(f"{about}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(text), "oid": sha256(text).hexdigest()}
                for name, text in self.files.items()
            ]
            self._answer(json.dumps(tree).encode())
        elif "/me/my-bert/resolve/" in self.path:
            self._answer(self.files[self.path.rpartition("/")[2]])
        else:
            self._answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    def _answer(self, body: bytes | None, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        name = self.path.rpartition("/")[2]
        self.send_response(404 if body is None else status)
        for header, value in {**(headers or {}), "X-Repo-Commit": self.commit, "ETag": f'"{name}"'}.items():
            self.send_header(header, value)
        size = len(self.files.get(name, b"")) if self.command == "HEAD" else len(body or b"")
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body or b"")

    def log_message(self, *_: object) -> None:
        pass


def test_a_model_of_the_hub_is_pinned_by_its_commit(tmp_path: Path) -> None:
    script = """
import sys
from isobatch.deployments.sources import local, pinned
from isobatch.profiles.errors import UserError
for model in sys.argv[1:]:
    try:
        print(pinned(model), *sorted(path.name for path in local(pinned(model)).iterdir()))
    except UserError as error:
        print(error)
"""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    url = f"hf://me/my-bert@{Hub.commit}"
    models = ["me/my-bert", "hf://me/my-bert@main", url, "me/my-bert@v9", "me/my-gpt"]
    place = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}  # read when imported
    done = subprocess.run(
        [sys.executable, "-c", script, *models], env=os.environ | place, capture_output=True, text=True, check=True
    )
    server.shutdown()
    server.server_close()
    lines = done.stdout.splitlines()
    assert lines[:3] == [f"{url} config.json model.safetensors"] * 3
    assert lines[3:] == [
        "hf://me/my-bert: the hub has no revision 'v9' of it",
        "me/my-gpt: no such directory here, and no such model on the hub that you may read (HF_TOKEN)",
    ]


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


PLAIN = {"model.safetensors": "weights", "config.json": "{}", "exits.json": "rules", "tokenizer.json": "words"}
CASCADE = {
    "cascade.json": "levels",
    "exits.json": "rules",
    "level-0/model.safetensors": "small",
    "level-0/config.json": "{}",
    "level-1/model.safetensors": "large",
}


def test_the_content_of_a_checkpoint_is_all_that_its_answers_depend_on(tmp_path: Path) -> None:
    assert content_of(written(tmp_path, PLAIN)) == sha256(b"{}rulesweights").hexdigest()[:16]
    assert content_of(tmp_path / "nowhere") == ""


@pytest.mark.parametrize("name", CASCADE)
def test_the_content_of_a_cascade_is_that_of_all_its_levels(tmp_path: Path, name: str) -> None:
    one, other = written(tmp_path / "one", CASCADE), written(tmp_path / "other", CASCADE | {name: "otherwise"})
    assert content_of(one) != content_of(other)
    assert content_of(one) == content_of(written(tmp_path / "same", CASCADE))
