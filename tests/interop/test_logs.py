"""Reading of logs: a hand-made tau2 file and its copies in other layouts, ToolSandbox and chat files."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from captrain.contract import calls_of
from captrain.errors import UserError
from captrain.interop.logs.reading import Logs, read_logs
from captrain.interop.logs.source import DROPPED
from captrain.records import Rollout

LIBRARY = Path(__file__).parents[1] / "logs" / "library.json"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "tau2"
SECRET = "sk-THIS-IS-A-SECRET"


def library() -> dict[str, Any]:
    return json.loads(LIBRARY.read_text())


def written(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def split(folder: Path, data: dict[str, Any]) -> Path:
    """Write results in the layout of tau2 1.0, with a file for each simulation."""
    for one in data["simulations"]:
        written(folder / "simulations" / f"{one['id']}.json", one)
    index = [{"id": one["id"], "task_id": one["task_id"], "trial": one["trial"]} for one in data["simulations"]]
    rest = {key: value for key, value in data.items() if key != "simulations"}
    written(folder / "results.json", {**rest, "format_version": "1.0", "simulation_index": index})
    return folder


def bare(rollouts: Iterable[Rollout]) -> list[dict[str, Any]]:
    """Rollouts without their ids, which depend on the file's bytes."""
    return [rollout.model_dump(exclude={"id"}) for rollout in rollouts]


def said(message: dict[str, Any]) -> tuple[Any, ...]:
    """A message of a tau2 file as (role, content, calls)."""
    calls = [(call["id"], call["name"], call["arguments"]) for call in message.get("tool_calls") or []]
    return message["role"], message["content"] or "", calls


def recorded(message: dict[str, Any]) -> tuple[Any, ...]:
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    return message["role"], message["content"], calls


def assert_whole(path: Path, logs: Logs) -> None:
    """Assert that all simulations of a tau2 file are read with rewards and messages, in order."""
    simulations = json.loads(path.read_text(encoding="utf-8"))["simulations"]
    assert len(logs.rollouts) == len(simulations) and not logs.skipped
    for rollout, simulation in zip(logs.rollouts, simulations, strict=True):
        reward = simulation["reward_info"]["reward"]
        assert (rollout.score.reward if rollout.score else rollout.task.data["recorded_reward"]) == reward
        assert rollout.outcome == ("error" if rollout.score is None else "passed" if reward == 1.0 else "failed")
        assert [recorded(message) for message in rollout.messages] == [said(m) for m in simulation["messages"]]
        results = [message for message in simulation["messages"] if message["role"] == "tool"]
        assert [m["tool_call_id"] for m in rollout.messages if m["role"] == "tool"] == [m["id"] for m in results]
        assert (rollout.task.data["task"], rollout.trial) == (simulation["task_id"], simulation["trial"])


def test_every_reward_and_message_of_a_tau2_file_is_kept() -> None:
    logs = read_logs([LIBRARY])
    assert_whole(LIBRARY, logs)
    assert [rollout.outcome for rollout in logs.rollouts].count("error") == 1
    assert {rollout.environment for rollout in logs.rollouts} == {"tau2/library"}


@pytest.mark.needs("shared")
@pytest.mark.parametrize("name", ["gpt-4.1_airline_1trial.json", "gpt-4.1_retail_1trial.json"])
def test_every_reward_and_message_of_the_shared_tau2_files_is_kept(name: str) -> None:
    assert_whole(SHARED / name, read_logs([SHARED / name]))


def test_the_reference_is_the_embedded_task_with_the_information_to_tell() -> None:
    rollouts = {one.task.data["task"]: one for one in read_logs([LIBRARY]).rollouts if one.trial == 0}
    calls = [call for message in rollouts["renew"].reference for call in calls_of(message)]
    assert calls[-1] == ("renew_loan", {"loan_id": "L-4", "weeks": 2})
    assert rollouts["renew"].reference[-1]["informs"] == []
    assert rollouts["fee"].reference[-1]["informs"] == ["3.50"]
    assert rollouts["fee"].score and rollouts["fee"].score.parts == {"db": 1.0, "communicate": 1.0}


def test_both_layouts_of_tau2_give_the_same_rollouts(tmp_path: Path) -> None:
    other = read_logs([split(tmp_path, library())])
    assert bare(other.rollouts) == bare(read_logs([LIBRARY]).rollouts)
    assert "1.0" in other.sources[0]["format"]


def test_a_missing_simulation_file_of_the_index_is_listed(tmp_path: Path) -> None:
    folder = split(tmp_path, library())
    (folder / "simulations" / "s03.json").unlink()
    (folder / "simulations" / "s05.json").write_text("{")
    logs = read_logs([folder])
    assert [(one.place, one.reason.split(":")[0]) for one in logs.skipped] == [
        ("simulations/s03.json", "the file is missing"),
        ("simulations/s05.json", "it is not JSON"),
    ]
    assert logs.sources[0]["entries"] == 12 == logs.sources[0]["imported"] + logs.sources[0]["skipped"]


def without(data: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != name}


def test_a_missing_termination_reason_is_no_error(tmp_path: Path) -> None:
    data = library()
    data["simulations"] = [without(one, "termination_reason") for one in data["simulations"]]
    logs = read_logs([written(tmp_path / "a.json", data)])
    assert [rollout.outcome for rollout in logs.rollouts].count("error") == 0 and not logs.skipped


def test_a_simulation_without_a_task_is_listed(tmp_path: Path) -> None:
    data = library()
    first, second, third = data["simulations"][:3]
    data["simulations"] = [{**first, "task_id": None}, without(second, "task_id"), third]
    data["info"]["environment_info"] = "elsewhere"
    logs = read_logs([written(tmp_path / "a.json", data)])
    assert len(logs.rollouts) == 1 and [one.reason for one in logs.skipped] == ["it names no task"] * 2


def test_json_that_is_neither_object_nor_array_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('"hello"')
    with pytest.raises(UserError, match="of no known format"):
        read_logs([tmp_path / "a.json"])


def test_a_file_without_info_and_tasks_has_an_unknown_domain_and_no_references(tmp_path: Path) -> None:
    bare_file = without(without(library(), "info"), "tasks")
    logs = read_logs([written(tmp_path / "b.json", bare_file)])
    assert {(r.environment, len(r.reference)) for r in logs.rollouts} == {("tau2/unknown", 0)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda one: one.update(reward_info=None), "no outcome found"),
        (lambda one: one.update(messages=[]), "there are no messages"),
    ],
)
def test_an_unreadable_entry_is_listed_with_its_reason(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    data = library()
    change(data["simulations"][7])
    logs = read_logs([written(tmp_path / "a.json", data)])
    assert [(one.source, one.place, one.reason) for one in logs.skipped] == [("a.json", "simulation 7", reason)]
    assert len(logs.rollouts) == 11


def test_a_broken_or_unknown_file_does_not_stop_the_others(tmp_path: Path) -> None:
    broken, unknown = tmp_path / "broken.json", written(tmp_path / "unknown.json", {"some": "thing"})
    broken.write_text(LIBRARY.read_text()[:1000])
    logs = read_logs([broken, unknown, LIBRARY])
    assert len(logs.rollouts) == 12
    assert [(one.source, one.reason.split(":")[0]) for one in logs.skipped] == [
        ("broken.json", "it is not JSON"),
        ("unknown.json", "it is of no known format"),
    ]
    with pytest.raises(UserError, match=r"there is no rollout in .*broken\.json: it is not JSON(.|\n)*result_summary"):
        read_logs([broken])
    with pytest.raises(UserError, match=r"nowhere\.json does not exist"):
        read_logs([tmp_path / "nowhere.json"])


def test_a_file_given_twice_counts_once() -> None:
    assert len(read_logs([LIBRARY, LIBRARY]).rollouts) == 12


def test_credentials_are_removed_everywhere(tmp_path: Path) -> None:
    data = library()
    assert SECRET in json.dumps(data["info"])
    one = data["simulations"][0]
    one["provider"] = {"api_key": SECRET}
    one["messages"][0]["raw_data"] = {"headers": {"Authorization": f"Bearer {SECRET}"}}
    call = next(message for message in one["messages"] if message["tool_calls"])["tool_calls"][0]
    call["arguments"] = {"card_id": "C-17", "login": [{"api_key": SECRET, "password": SECRET}], "access_token": SECRET}
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Hello", "headers": SECRET},
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"token": SECRET})}}],
                },
            ],
            "reward": 1,
            "api_key": SECRET,
        }
    ]
    chat = tmp_path / "chat.jsonl"
    chat.write_text("\n".join(map(json.dumps, rows)))
    logs = read_logs([written(tmp_path / "a.json", data), chat])
    dumped = json.dumps([rollout.model_dump() for rollout in logs.rollouts]) + json.dumps([logs.sources, logs.tools])
    assert SECRET not in dumped and dumped.count(DROPPED) == 4
    assert logs.sources[0]["agent"] == {"model": "made-up-agent", "temperature": 0.0}


def test_counts_of_tokens_are_no_credentials(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    call = {"function": {"name": "f", "arguments": {"prompt_tokens": 3, "max_tokens": 4, "tokenizer": "x"}}}
    chat.write_text(json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}], "reward": 0}))
    (rollout,) = read_logs([chat]).rollouts
    assert calls_of(rollout.messages[0])[0][1] == {"prompt_tokens": 3, "max_tokens": 4, "tokenizer": "x"}


def test_tools_are_inferred_from_calls() -> None:
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in read_logs([LIBRARY]).tools}
    assert set(tools) == {"get_member_details", "get_loan_details", "renew_loan", "return_loan", "get_fee"}
    assert tools["renew_loan"]["required"] == ["loan_id", "weeks"] == sorted(tools["renew_loan"]["properties"])


CHATS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}], "reward": 0.25},
    {"conversation": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "score": 1, "task_id": "t1"},
    {
        "trajectory": [
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
        ],
        "success": True,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}],
    },
]


def test_chats_are_read_with_the_usual_column_names(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join([*map(json.dumps, CHATS), "", "{broken", '{"messages": []}', '{"reward": 1}', "[]"]))
    logs = read_logs([path])
    assert [(r.outcome, r.score.reward if r.score else None) for r in logs.rollouts] == [
        ("failed", 0.25),
        ("passed", 1.0),
        ("passed", 1.0),
    ]
    assert [r.messages[0]["content"] for r in logs.rollouts] == ["Hi", "Hi", ""]
    assert calls_of([*logs.rollouts][2].messages[0]) == [("f", {"x": 1})]
    assert logs.tools == [CHATS[2]["tools"][0]]
    assert [(one.place, one.reason.split(":")[0]) for one in logs.skipped] == [
        ("line 5", "it is not JSON"),
        ("line 6", "no outcome found"),
        ("line 7", "there are no messages (a list named messages, conversation, conversations, trajectory, items)"),
        ("line 8", "it is not an object"),
    ]


def milestone(namespace: str, **row: Any) -> dict[str, Any]:
    constraint = {"database_namespace": namespace, "snapshot_constraint": "addition_similarity"}
    return {"snapshot_constraints": [{**constraint, "target_dataframe": [row]}]}


def sandbox(folder: Path) -> Path:
    """A made-up result folder in ToolSandbox's layout."""
    call = {"id": "call_1", "function": {"name": "set_lamp", "arguments": '{"on": true}'}}
    trace = milestone("SANDBOX", tool_trace=json.dumps({"tool_name": "set_lamp", "arguments": {"on": True}}))
    turns = [
        {"role": "system", "content": "Do not guess."},
        {"role": "user", "content": "Light the lamp."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "name": "set_lamp",
            "content": "ConnectionError: no lamp",
            "tool_details": {
                "milestone_matches": [{"milestone_index": 0, "milestone": trace, "milestone_similarity": 0.5}]
            },
        },
        {"role": "assistant", "content": "It is lit."},
    ]
    results = []
    for name, similarity, fault, text in (
        ("lamp", 0.5, None, None),
        ("lamp_alt", 1.0, None, None),
        ("lamp_broken", 0, "KeyError", "KeyError: 'nothing'"),
        ("weather", 0, "KeyError", "KeyError: 'RAPID_API_KEY'"),
        ("gone", 1.0, None, None),
    ):
        results.append(
            {
                "name": name,
                "categories": ["SINGLE_TOOL_CALL", "THREE_DISTRACTION_TOOLS"],
                "similarity": similarity,
                "exception_type": fault,
                "traceback": text,
                "milestone_mapping": {"0": [3, similarity]},
                "minefield_mapping": {"0": [2, 0.0]},
            }
        )
        if name != "gone":
            written(folder / "trajectories" / name / "conversation.json", turns)
    written(folder / "result_summary.json", {"per_scenario_results": results, "git_sha": "0000000"})
    return folder


def test_a_toolsandbox_folder_gives_similarities_and_milestones_and_exceptions_are_errors(tmp_path: Path) -> None:
    logs = read_logs([sandbox(tmp_path)])
    rollouts = {rollout.task.data["task"]: rollout for rollout in logs.rollouts}
    assert {name: one.outcome for name, one in rollouts.items()} == {
        "lamp": "failed",
        "lamp_alt": "passed",
        "lamp_broken": "error",
    }
    assert [(one.place, one.reason) for one in logs.skipped] == [
        ("scenario weather", "it needs an external key"),
        ("scenario gone", "trajectories/gone/conversation.json is missing"),
    ]
    lamp = rollouts["lamp"]
    assert lamp.score and lamp.score.parts == {"milestone 1": 0.5, "milestone 2": 1.0}
    assert lamp.task.data["milestones"] == [
        {"tool": "set_lamp", "arguments": {"on": True}},
        {"namespace": "state", "minefield": True},
    ]
    assert lamp.task.data["kind"] == "single_tool_call" and lamp.messages[3]["error"] is True
    assert calls_of(lamp.messages[2]) == [("set_lamp", {"on": True})]


def test_a_folder_of_several_results_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(LIBRARY.read_text())
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "chat.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    assert len(read_logs([tmp_path]).rollouts) == 15


def test_importing_needs_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'trl', 'pandas', 'matplotlib'}"
    code = f"import sys, captrain.interop.logs.tau2, captrain.interop.logs.chat; print({heavy} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
