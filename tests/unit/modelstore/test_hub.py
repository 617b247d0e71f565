"""Pulling from a hub: a tiny one on this machine that speaks the few routes that the library uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from meshfire.errors import CheckpointError, DataLoss, Unavailable, UnknownModel
from meshfire.modelstore import pull
from meshfire.modelstore.hub import HubSource, git_blob_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 500,
    "chat_template.jinja": b"{{ messages }}",
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "original/config.json": b"{}",
}


@dataclass
class Hub:
    """What the server holds and what it was asked."""

    endpoint: str = ""
    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    #: bytes that are sent instead of what the listing promises
    sent: dict[str, bytes] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)

    def entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        facts: dict[str, Any] = {"size": len(content)}
        if name.endswith(".safetensors"):
            facts["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 134}
        return facts


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.split("?")[0]
            if path.startswith("/api/models/owner/name/tree/"):
                tree = [
                    {"type": "file", "path": name, "oid": git_blob_id(content), **state.entry(name)}
                    | ({"lfs": {**lfs, "oid": lfs["sha256"]}} if (lfs := state.entry(name).get("lfs")) else {})
                    for name, content in state.files.items()
                ]
                self.send(json.dumps(tree).encode(), body)
            elif path.startswith("/api/models/owner/name"):
                siblings = [
                    {"rfilename": name, "blobId": git_blob_id(content), **state.entry(name)}
                    for name, content in state.files.items()
                ]
                info = {"id": "owner/name", "sha": COMMIT, "siblings": siblings, "private": False}
                self.send(json.dumps(info).encode(), body)
            elif path.startswith(f"/owner/name/resolve/{COMMIT}/"):
                name = path.removeprefix(f"/owner/name/resolve/{COMMIT}/")
                if body:
                    state.downloads.append(name)
                self.send(state.sent.get(name, state.files[name]), body, etag=git_blob_id(state.files[name]))
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def send(self, content: bytes, body: bool, etag: str = "x") -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    state.endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def test_weights_configuration_and_template_come_and_no_code(hub: Hub, tmp_path: Path) -> None:
    stages: set[str] = set()
    directory = pull(
        "hf:owner/name",
        name="name",
        root=tmp_path,
        source=HubSource("owner/name", endpoint=hub.endpoint),
        progress=lambda stage, done, total: stages.add(stage),
    )
    found = {path.name: path.read_bytes() for path in directory.iterdir()}
    del found["meshfire.json"]
    assert found == {name: FILES[name] for name in ("config.json", "model.safetensors", "chat_template.jinja")}
    assert {"fetch", "verify download", "checksum"} <= stages


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_is_not_what_the_hub_promised_is_refused_and_fetched_anew(
    hub: Hub, tmp_path: Path, name: str
) -> None:
    source = HubSource("owner/name", endpoint=hub.endpoint)
    hub.sent[name] = bytes(reversed(FILES[name]))
    with pytest.raises(DataLoss, match=name):
        pull("m", root=tmp_path, source=source)
    hub.sent.clear()
    hub.downloads.clear()
    directory = pull("m", root=tmp_path, source=source)
    assert (directory / name).read_bytes() == FILES[name]
    assert hub.downloads == [name], "what was sound is not fetched again"


def test_a_repository_without_safetensors_is_refused(hub: Hub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(CheckpointError, match="no safetensors"):
        pull("m", root=tmp_path, source=HubSource("owner/name", endpoint=hub.endpoint))


def test_an_unknown_repository_is_an_unknown_model(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="hf:owner/other"):
        pull("m", root=tmp_path, source=HubSource("owner/other", endpoint=hub.endpoint))


def test_a_hub_that_is_away_is_said_to_be_away(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="hf:owner/name"):
        pull("m", root=tmp_path, source=HubSource("owner/name", endpoint="http://127.0.0.1:9"))
