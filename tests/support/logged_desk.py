"""A desk with a policy: small dialogues, written as tau2-bench result files and diagnosed."""

import json
from pathlib import Path
from typing import Any

from captrain.diagnosis import DiagnosedRollout, diagnose
from captrain.interop import read_logs
from captrain.run import SelectionSettings

LIMITS = SelectionSettings(delta=0.2, coverage=0.1, agreement=2, confidence=0.95, floor=0.0, resamples=20)
POLICY = """The current time is 2024-05-15 15:00:00 EST.
Otherwise, flight can be cancelled if any of the following is true:
- The booking was made within the last 24 hrs
If the user complains about delayed flights in a reservation and wants to change or cancel the reservation, pay.
Do not proactively offer these unless the user complains about the situation and explicitly asks for it.
"""
PROFILE = {"user_id": "ann_1", "membership": "gold", "reservations": ["AAA111", "BBB222", "CCC333"]}
OLD = {
    "reservation_id": "AAA111", "user_id": "ann_1", "cabin": "economy", "insurance": "no", "flights": [],
    "created_at": "2024-05-01T10:00:00", "passengers": [{"first_name": "Ann", "last_name": "Lee", "dob": "1990-01-01"}],
}  # fmt: skip
Message = dict[str, Any]
RECENT = {"created_at": "2024-05-15T14:00:00"}


ITEMS = [{"name": "Boots", "item_id": "b1", "price": 9.5}, {"name": "Kettle", "item_id": "k1", "price": 7.0}]


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def says(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def calls(name: str, result: object, error: bool = False, **arguments: object) -> list[Message]:
    call = {"id": "c", "name": name, "arguments": arguments}
    answer = {"role": "tool", "id": "c", "content": json.dumps(result), "error": error}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}, answer]


def profile() -> list[Message]:
    return calls("get_user_details", PROFILE, user_id="ann_1")


def record(**changes: object) -> list[Message]:
    entry = {**OLD, **changes}
    return calls("get_reservation_details", entry, reservation_id=entry["reservation_id"])


def gold(name: str, **arguments: object) -> dict[str, object]:
    return {"name": name, "arguments": arguments, "requestor": "assistant"}


READ = gold("get_reservation_details", reservation_id="AAA111")
CANCEL = gold("cancel_reservation", reservation_id="AAA111")


class Desk:
    """Writes tau2-bench result files and diagnoses their rollouts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.policy = folder, POLICY
        self.tasks: list[dict[str, Any]] = []
        self.simulations: list[dict[str, Any]] = []

    def add(self, messages: list[Message], *actions: object, reward: float = 0.0, **more: Any) -> "Desk":
        name = str(len(self.tasks))
        informs, script = more.pop("informs", []), more.pop("script", "Ask for help.")
        criteria = {"actions": [*actions], "communicate_info": informs, "reward_basis": more.pop("basis", [])}
        scenario = {"instructions": {"domain": "airline", "task_instructions": script}}
        self.tasks.append({"id": name, "user_scenario": scenario, "evaluation_criteria": criteria})
        greeting = [{"role": "assistant", "content": "Hi! How can I help you today?"}]
        simulation = {"task_id": name, "trial": 0, "messages": greeting + messages, "reward_info": {"reward": reward}}
        self.simulations.append({**simulation, **more})
        return self

    def explained(self) -> list[DiagnosedRollout]:
        info = {"environment_info": {"domain_name": "airline", "policy": self.policy}, "agent_info": {"llm": "a"}}
        path = self.folder / "log.json"
        path.write_text(json.dumps({"info": info, "tasks": self.tasks, "simulations": self.simulations}))
        diagnosis = diagnose(read_logs([path]), LIMITS, runs=2, count=4, seed=0)
        return [*diagnosis.diagnosed.rollouts]
