"""Untargeted environments: drawn without the diagnosis, or read from the published layout and played in the sandbox."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from support.stages import run_here

from captrain.benchmarks import servicedesk as desk
from captrain.comparison.baselines import scenarios, untargeted
from captrain.comparison.baselines.scenarios import published_scenarios, text_of
from captrain.comparison.baselines.untargeted import narrowed_desk, untargeted_environments
from captrain.contract import load_file, tool_call
from captrain.environments.loading import load_environment
from captrain.errors import UserError
from captrain.ledger import LedgerEntry
from captrain.models.lora import adapter_digest
from captrain.records import load as load_records
from captrain.records import publish
from captrain.run import Spec, compose_spec, publish_spec

ROOT = Path(__file__).parents[2]
FEW = ["baselines.awm.run=true", "baselines.awm.environments=2", "environments.seeds=25", "evaluation.tasks=20"]
TRAINING = [
    "policy.max_turns=2", "policy.max_tokens=4", "policy.precision=float32", "trainer.group_size=2",
    "trainer.groups_per_step=2", "trainer.rank=2", "trainer.alpha=2", "machine.workers=1",
]  # fmt: skip

# An application like the published ones, without the framework: it answers ASGI requests from its database.
APPLICATION = """
import json
import os
import sqlite3
from urllib.parse import parse_qs


def rows(statement, values=()):
    connection = sqlite3.connect(os.environ["DATABASE_PATH"].removeprefix("sqlite:///"))
    found = connection.execute(statement, values).fetchall()
    connection.commit()
    connection.close()
    return found


async def app(scope, receive, send):
    method, path = scope["method"], scope["path"]
    found, status = {"detail": "no such page"}, 404
    if (method, path) == ("GET", "/shelves"):
        room = parse_qs(scope["query_string"].decode()).get("room", ["%"])[0]
        found = [list(row) for row in rows("SELECT id, room, made FROM shelves WHERE room LIKE ?", (room,))]
        status = 200
    elif method == "POST":
        given = json.loads((await receive())["body"])
        rows("INSERT INTO books (title, shelf) VALUES (?, ?)", (given["title"], int(path.split("/")[2])))
        found, status = {"ok": True}, 201
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(found).encode()})


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app)
"""
FRAMEWORK = """
import os
import sqlite3

from fastapi import FastAPI, Query
from pydantic import BaseModel

app = FastAPI()


class Book(BaseModel):
    title: str


def connection():
    return sqlite3.connect(os.environ["DATABASE_PATH"].removeprefix("sqlite:///"))


@app.get("/shelves", operation_id="list_shelves", summary="Shelves")
async def list_shelves(room: str = Query("%", description="Room")):
    return connection().execute("SELECT id, room FROM shelves WHERE room LIKE ?", (room,)).fetchall()


@app.post("/shelves/{shelf}/books", operation_id="add_book", description="Add a book.")
async def add_book(shelf: int, book: Book):
    opened = connection()
    opened.execute("INSERT INTO books (title, shelf) VALUES (?, ?)", (book.title, shelf))
    opened.commit()
    return {"ok": True}
"""
VERIFIER = """
def verify_task_completion(initial_db_path, final_db_path, final_answer=None):
    import os
    import sqlite3

    assert os.path.exists(initial_db_path) and os.path.exists(final_db_path)
    counts = []
    for path in (initial_db_path, final_db_path):
        connection = sqlite3.connect(path)
        found = connection.execute("SELECT count(*) FROM books WHERE title = 'Walden' AND shelf = 2")
        counts.append(found.fetchone()[0])
        connection.close()
    return {"result": "complete" if counts[1] == counts[0] + 1 and final_answer else "others"}
"""
ALWAYS = "def verify_task_completion(initial_db_path, final_db_path):\n    return {'result': 'complete'}\n"
RAISES = VERIFIER.replace("FROM books", "FROM nowhere")
TABLES = [
    {"name": "shelves",
     "ddl": "CREATE TABLE shelves (id INTEGER PRIMARY KEY, room TEXT, made TEXT DEFAULT CURRENT_TIMESTAMP)"},
    {"name": "books", "ddl": "CREATE TABLE books (id INTEGER PRIMARY KEY, title TEXT, shelf INTEGER)",
     "indexes": ["CREATE INDEX titles ON books(title)"]},
]  # fmt: skip
INSERTS = [
    "INSERT INTO shelves (id, room) VALUES (1, 'attic');",
    "INSERT INTO shelves (id, room, made) VALUES (2, 'hall', datetime('now', '-2 days'));",
    "INSERT INTO nowhere VALUES (1);",
]
ENDPOINTS = [
    {"path": "/shelves", "method": "GET", "operation_id": "list_shelves", "summary": "Shelves",
     "request_params": {"room": {"type": "string", "param_type": "query", "required": False, "description": "Room"}}},
    {"path": "/shelves/{shelf}/books", "method": "POST", "operation_id": "add_book", "description": "Add a book.",
     "request_params": {"shelf": {"type": "integer", "param_type": "path", "required": True},
                        "title": {"type": "string", "param_type": "body", "required": True}}},
]  # fmt: skip
SOLUTION = [
    tool_call("list_shelves", {"room": "hall"}),
    tool_call("add_book", {"shelf": 2, "title": "Walden"}),
    {"role": "assistant", "content": "It stands in the hall."},
]


def layout(folder: Path, code: str = APPLICATION, verifiers: tuple[str, ...] = (VERIFIER, ALWAYS, RAISES)) -> Path:
    """A folder in the published layout, with one scenario of three tasks."""
    rows: dict[str, list[dict[str, Any]]] = {
        "gen_tasks": [{"tasks": ["Put a copy of Walden on the shelf in the hall.", "Look.", "Count."]}],
        "gen_db": [{"db_schema": {"tables": TABLES}}],
        "gen_sample": [{"sample_data": {"tables": [{"table_name": "all", "insert_statements": INSERTS}]}}],
        "gen_spec": [{"api_spec": {"api_groups": [{"group_name": "all", "endpoints": ENDPOINTS}]}}],
        "gen_envs": [{"db_path": "library.db", "full_code": code}],
        "gen_verifier.pure_code": [
            {"task_idx": at, "verification": {"code": verifier}} for at, verifier in enumerate(verifiers)
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in rows.items():
        named = [{"scenario": "Small Library" if name == "gen_db" else "small_library", **row} for row in found]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in named))
    return folder


def composed(*overrides: str, seed: int = 0) -> Spec:
    return compose_spec("default", seed, [*FEW, *overrides], ROOT / "conf")


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):
        yield folder


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our own environments, made without results of a diagnosis."""
    folder = tmp_path_factory.mktemp("drawn")
    with inside(folder):
        assert [
            place.skip for place in untargeted_environments(composed(), composed().baselines.awm, folder / "awm")
        ] == [0, 0]
    return folder / "awm"


class TestOwn:
    def test_untargeted_environments_do_not_depend_on_the_diagnosis(self, drawn: Path, tmp_path: Path) -> None:
        shutil.copytree(ROOT / "conf", tmp_path / "conf")
        (tmp_path / "results/capabilities").mkdir(parents=True)
        (tmp_path / "results/capabilities/capabilities.jsonl").write_text('{"id": "missing_write"}\n')
        other = composed("selection.delta=0.9", "capabilities.count=1", "labels.runs=9", "rollouts.tasks=40")
        with inside(tmp_path):
            untargeted_environments(other, other.baselines.awm, tmp_path / "awm")
        assert {path.name: path.read_bytes() for path in drawn.iterdir()} == {
            path.name: path.read_bytes() for path in (tmp_path / "awm").iterdir()
        }

    def test_only_seed_and_number_decide_the_text(self) -> None:
        texts = {(seed, number): narrowed_desk("one", seed, number) for seed in range(2) for number in range(6)}
        assert len(set(texts.values())) == len(texts)
        assert all(narrowed_desk("one", *key) == text for key, text in texts.items())

    def test_each_environment_pays_half_for_parts_and_half_for_success(self, drawn: Path) -> None:
        target = load_file(drawn / "untargeted_00.py")
        assert target.tools == desk.TOOLS
        for task in target.tasks("training", 20):
            reference = target.reference(task)
            assert target.score(task, target.play(task, reference)).reward == 1.0
            extra = [
                *reference[:-1],
                tool_call("wrap_order", {"order_id": task.data["orders"][0]["id"]}),
                reference[-1],
            ]
            spoilt = target.score(task, target.play(task, extra))
            assert not spoilt.success and spoilt.reward <= 0.5

    def test_all_have_passports_without_calibration(self, drawn: Path) -> None:
        from captrain.environments.loading import read_passports

        for passport in read_passports(drawn).values():
            assert passport.passed and passport.trusted and passport.calibration_tasks == 0
            assert not [check for check in passport.checks if "base" in check.name]
            assert load_environment(drawn, passport, composed().machine).name == passport.capability

    def test_unreachable_bounds_are_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(untargeted, "DRAWS", 1)
        with pytest.raises(UserError, match="0 of 2 untargeted environments earned a passport"):
            untargeted_environments(
                composed("environments.random_reward=0.0", "environments.broken_reward=0.0"),
                composed().baselines.awm,
                tmp_path,
            )
        assert not [*tmp_path.glob("*.passport.json")]


class TestPublished:
    def test_a_scenario_plays_in_the_sandbox_and_its_verifier_scores(self, tmp_path: Path) -> None:
        asked = composed("baselines.awm.environments=1", f"baselines.awm.source={layout(tmp_path / 'source')}")
        [place] = untargeted_environments(asked, asked.baselines.awm, tmp_path / "awm")
        target = place.target(asked.machine)
        [tool] = [tool["function"] for tool in target.tools if tool["function"]["name"] == "add_book"]
        assert tool["parameters"]["required"] == ["shelf", "title"]
        first, second = target.tasks("training", 2)
        played = target.play(first, SOLUTION)
        assert played[3]["content"] == '[[2, "hall", "2025-12-30 12:00:00"]]'
        assert target.score(first, played).model_dump(exclude={"parts"}) == {"reward": 1.0, "success": True}
        assert target.floor(first).reward == 0.0
        assert target.score(second, target.play(second, [*SOLUTION[:1], *SOLUTION[2:]])).reward == 0.0
        assert target.score(second, target.play(second, [*SOLUTION[:2], SOLUTION[1], SOLUTION[2]])).reward == 0.0

    def test_tasks_that_pass_on_the_untouched_database_are_left_out(self, tmp_path: Path) -> None:
        asked = composed("baselines.awm.environments=1")
        [passport] = published_scenarios(layout(tmp_path / "source"), 1, asked, tmp_path / "awm")
        checks = {check.name: check for check in passport.checks}
        assert checks["tasks"].measured == 1 and checks["tasks"].detail.startswith("2 left out")
        assert checks["statements that the schema refuses"].measured == 1
        text = (tmp_path / "awm/small_library.py").read_text()
        assert "Walden" in text and "Count." not in text and "nowhere" not in text.replace("INTO nowhere", "")
        with pytest.raises(UserError, match=r"0 scenarios .*small_library: tasks is 0\.0"):
            published_scenarios(layout(tmp_path / "none", verifiers=(ALWAYS, ALWAYS)), 1, asked, tmp_path / "rejected")
        assert not [*(tmp_path / "rejected").iterdir()]

    def test_a_nondeterministic_application_is_rejected(self, tmp_path: Path) -> None:
        code = APPLICATION.replace("status = 200", "status = 200; found.append(os.urandom(8).hex())")
        with pytest.raises(UserError, match="random calls meet other observations"):
            published_scenarios(layout(tmp_path / "source", code), 1, composed(), tmp_path / "awm")

    def test_the_framework_runs_in_the_sandbox(self, tmp_path: Path) -> None:
        source = layout(tmp_path / "source", FRAMEWORK)
        asked = composed("baselines.awm.environments=1", f"baselines.awm.source={source}")
        [place] = untargeted_environments(asked, asked.baselines.awm, tmp_path / "awm")
        target = place.target(asked.machine)
        task = target.tasks("training", 1)[0]
        assert target.score(task, target.play(task, SOLUTION)).success and not target.floor(task).success

    def test_a_package_missing_in_the_sandbox_is_named(self, tmp_path: Path) -> None:
        code = FRAMEWORK.replace("import sqlite3", "import sqlite3\nfrom flask import Flask")
        with pytest.raises(UserError, match="small_library imports flask, which the sandbox does not have"):
            published_scenarios(layout(tmp_path / "source", code), 2, composed(), tmp_path / "awm")


class TestLayout:
    def test_the_real_framework_runs_if_installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # The driver runs these, in its own process if confined.
        taken = ("sqlite3.connect", "sqlite3.dbapi2.connect", "os.getcwd", "os.path.exists", "os.path.isfile")
        for name in taken:
            monkeypatch.setattr(name, resolve_name(name))
        monkeypatch.setenv("DATABASE_PATH", "")
        [scenario] = scenarios.scenarios(layout(tmp_path / "source", FRAMEWORK))
        (tmp_path / "one.py").write_text(text_of(scenario))
        target = load_file(tmp_path / "one.py")
        task = target.tasks("training", 1)[0]
        played = target.play(task, SOLUTION)
        shown = {tool["function"]["name"]: tool["function"]["parameters"] for tool in target.tools}
        assert [*shown["add_book"]["properties"]] == ["shelf", "title"]
        assert [message["content"] for message in played if message["role"] == "tool"] == [
            '[[2,"hall"]]',
            '{"ok":true}',
        ]
        assert target.score(task, played).success and not target.floor(task).success
        wrong = target.play(task, [tool_call("add_book", {"shelf": "x", "title": "Walden"})])
        assert json.loads(wrong[-1]["content"])["error"] == 422

    @pytest.mark.parametrize("name", scenarios.LAYOUT)
    def test_a_missing_file_and_a_malformed_line_are_named(self, tmp_path: Path, name: str) -> None:
        path = layout(tmp_path) / f"{name}.jsonl"
        whole = path.read_text()
        path.write_text(whole + '{"scenario": "x"}\n')
        line = len(whole.splitlines()) + 1
        with pytest.raises(UserError, match=rf"{name}\.jsonl, line {line} is not a whole "):
            scenarios.scenarios(tmp_path)
        path.unlink()
        with pytest.raises(UserError, match=rf"{name}\.jsonl is missing"):
            scenarios.scenarios(tmp_path)

    def test_scenarios_missing_in_a_file_are_skipped(self, tmp_path: Path) -> None:
        folder = layout(tmp_path)
        path = folder / "gen_tasks.jsonl"
        path.write_text(json.dumps({"scenario": "elsewhere", "tasks": ["Go."]}) + "\n" + path.read_text())
        assert [one.name for one in scenarios.scenarios(folder)] == ["small_library"]
        path.write_text(json.dumps({"scenario": "elsewhere", "tasks": ["Go."]}) + "\n")
        with pytest.raises(UserError, match="no scenario is in all of"):
            scenarios.scenarios(folder)


class TestStage:
    def test_it_spends_exactly_traces_total(
        self, drawn: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(untargeted, "drawn_environments", lambda spec, count, folder: _copied(drawn, folder))
        with inside(tmp_path):
            Path("artifacts").mkdir()
            Path("artifacts/base").symlink_to(tiny)
            publish_spec(composed(*TRAINING), Path("results/spec.yaml"))
            spent = {"rollouts": ("diagnosis", 8), "environments": ("calibration", 4), "adapters": ("training", 4)}
            for stage, (purpose, count) in spent.items():
                entry = LedgerEntry.model_validate(
                    {"stage": stage, "purpose": purpose, "method": "trace", "rollouts": count}
                )
                publish(Path(f"results/{stage}/ledger.jsonl"), [entry])
            run_here("awm", ROOT)
            row = json.loads(Path("results/awm/index.json").read_text(encoding="utf-8"))["awm"]
            [entry] = load_records(Path("results/awm/ledger.jsonl"), LedgerEntry)
            assert (row["rollouts"], entry.rollouts, entry.method, entry.purpose) == (16, 16, "awm", "training")
            assert adapter_digest(Path(row["path"])) == row["digest"]
            assert {path.stem for path in Path("results/awm").glob("*.py")} == {"untargeted_00", "untargeted_01"}

    def test_a_disabled_row_writes_empty_results(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with inside(tmp_path):
            publish_spec(composed("baselines.awm.run=false"), Path("results/spec.yaml"))
            run_here("awm", ROOT)
            assert json.loads(Path("results/awm/index.json").read_text(encoding="utf-8")) == {}
            assert Path("results/awm/ledger.jsonl").read_text(encoding="utf-8") == ""
        assert "not run" in capsys.readouterr().out


def _copied(drawn: Path, folder: Path) -> Any:
    from captrain.environments.loading import read_passports

    shutil.copytree(drawn, folder)
    return [*read_passports(folder).values()]
