"""`captrain push`: a dry run writes exactly what is sent, and only `--send` sends (to a local stand-in of the hub)."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest
from support.exported import NAME, make_project

from captrain.models import adapter_digest
from captrain.records import file_digest, publish_json, publish_text
from captrain.run import compose_spec, publish_spec

ROOT = Path(__file__).parents[2]
KEY = "hf_" + "a1B2c3D4e5" * 3


class Hub(ThreadingHTTPServer):
    """A stand-in for the hub. `commits` has the files of each commit; `refusal` is a status for all requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories, self.commits = list[dict[str, Any]](), list[tuple[str, dict[str, bytes]]]()
        self.tokens, self.refusal = set[str | None](), 0


class Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        hub, body = cast(Hub, self.server), self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.refusal:
            return self.answer({"error": "no"}, hub.refusal)
        if self.path == "/api/repos/create":
            hub.repositories.append({"type": "model", **json.loads(body)})
            prefix = "datasets/" if hub.repositories[-1]["type"] == "dataset" else ""
            return self.answer({"url": f"http://127.0.0.1:{hub.server_address[1]}/{prefix}lab/agent"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            return self.answer({"files": modes})
        assert "/commit/main" in self.path
        lines = [json.loads(line) for line in body.splitlines()]
        values = [line["value"] for line in lines if line["key"] == "file"]
        hub.commits.append((self.path, {value["path"]: base64.b64decode(value["content"]) for value in values}))
        url = f"http://127.0.0.1:{hub.server_address[1]}/lab/agent/commit/1"
        self.answer({"commitUrl": url, "commitOid": "1", "pullRequestUrl": None})

    def do_GET(self) -> None:
        self.answer({"id": "lab/agent"}, cast(Hub, self.server).refusal or 200)

    def answer(self, value: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with an environment, two adapters and their routes."""
    root = tmp_path / "project"
    root.mkdir()
    make_project(root)
    publish_spec(compose_spec("smoke", 0, [], ROOT / "conf"), root / "results/spec.yaml")
    index = {}
    for number, name in enumerate((NAME, "missing_write")):
        folder = root / f"artifacts/adapters/{number}"
        publish_json(folder / "adapter_config.json", {"r": 4, "lora_alpha": 8, "base_model_name_or_path": "lab/base"})
        (folder / "adapter_model.safetensors").write_bytes(bytes(range(200)) + bytes([number]))
        publish_text(folder / "README.md", f"# {name}\n")
        index[name] = {"digest": adapter_digest(folder), "path": f"artifacts/adapters/{number}", "rollouts": 640}
    publish_json(root / "results/adapters/index.json", index)
    publish_text(root / "results/routes/routes.csv", "task,chosen\n1,base\n")
    return root


def push(project: Path, *words: str, hub: Hub | None = None) -> tuple[int, str]:
    """Run `captrain push`, and return the exit status and the output."""
    port = hub.server_address[1] if hub else 9
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_TOKEN": KEY, "HF_HOME": str(project / "home")}
    command = [sys.executable, "-m", "captrain.cli.app", "push", *words]
    environment = {**os.environ, **settings, "HF_HUB_OFFLINE": "0", "COLUMNS": "300"}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def written(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".captrain-outputs.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize(("kind", "repository"), [("adapters", "models"), ("environments", "datasets")])
def test_what_is_sent_is_what_the_dry_run_wrote(kind: str, repository: str, project: Path, hub: Hub) -> None:
    status, text = push(project, kind, "lab/agent", "--dry-run", "pushed", hub=hub)
    assert status == 0 and "nothing was sent" in text, text
    assert not hub.tokens
    files = written(project / "pushed")
    listing = json.loads(files["digests.json"])["files"]
    assert {*listing} == {*files} - {"digests.json"}
    assert all(file_digest(project / "pushed" / name) == content for name, content in listing.items())
    assert b"machine" not in files["spec.yaml"]
    if kind == "adapters":
        for name in (NAME, "missing_write"):
            assert {f"{name}/{part}" for part in ("adapter_config.json", "adapter_model.safetensors", "README.md")} < {
                *files
            }
        assert files["routes/routes.csv"] and b'base_model: "lab/base"' in files["README.md"]
    else:
        assert {f"{NAME}.py", f"{NAME}.passport.json"} < {*files}

    status, text = push(project, kind, "lab/agent", "--send", hub=hub)
    assert status == 0 and "/lab/agent/commit/1: " in text, text
    [(path, sent)] = hub.commits
    assert sent == files and path.startswith(f"/api/{repository}/lab/agent/commit/main")
    [made] = hub.repositories
    assert made["name"] == "agent" and made["organization"] == "lab" and made["visibility"] == "private"
    assert hub.tokens == {f"Bearer {KEY}"}


def test_nothing_is_sent_without_the_word_or_of_what_was_altered_or_holds_a_key(project: Path, hub: Hub) -> None:
    status, text = push(project, "adapters", "lab/agent", hub=hub)
    assert status == 2 and "nothing was sent to lab/agent" in text and "--send" in text
    card = project / "artifacts/adapters/0/README.md"
    card.write_text(f"HF_TOKEN={KEY}\n")
    status, text = push(project, "adapters", "lab/agent", "--send", hub=hub)
    assert status == 2 and f"{NAME}/README.md contains something that looks like a key" in text and KEY not in text
    (project / "artifacts/adapters/1/adapter_model.safetensors").write_bytes(b"others")
    status, text = push(project, "adapters", "lab/agent", "--send", hub=hub)
    assert status == 2 and "was altered" in text
    (project / f"results/environments/{NAME}.py").write_text("x = 1\n")
    status, text = push(project, "environments", "lab/agent", "--dry-run", "pushed", hub=hub)
    assert status == 2 and not (project / "pushed").exists()
    assert not hub.tokens


def test_a_hub_that_refuses_or_is_away_ends_in_one_message(project: Path, hub: Hub) -> None:
    hub.refusal = 403
    status, text = push(project, "adapters", "lab/agent", "--send", hub=hub)
    assert status == 2 and "the hub refuses lab/agent" in text and "hf auth login" in text, text
    status, text = push(project, "adapters", "lab/agent", "--send")
    assert status == 2 and "the hub does not answer" in text, text
    status, text = push(project, "adapters", "a/b/c", "--send", hub=hub)
    assert status == 2 and "OWNER/NAME" in text, text
