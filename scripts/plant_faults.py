"""Plants faults into solutions of benchmarks and writes logs with known causes: `python scripts/plant_faults.py
FOLDER`.

The solutions come from the embedded desk, the calendar of new projects, tau2's airline, retail and telecom, BFCL,
AgentDojo, and ToolSandbox (`--benchmark toolsandbox`). Each gets one fault (`planting`) and is played in its own world,
so everything after the fault is real. Failing ones are kept. Each benchmark gives a log for `captrain diagnose`, which
also contains untouched solutions. `truth.jsonl` says what was planted where, and `scripts/score_diagnosis.py` compares
a diagnosis with it.
"""

import argparse
import json
import os
import random
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from planting import CLASSES, CLOSING, REFUSABLE, TOKEN, Case, PlantedStep, Played, Tools, is_id, leaves, request_of

from captrain.benchmarks import (
    Replay,
    ReplayCall,
    ServiceDesk,
    World,
    Worlds,
    load_benchmark,
    made_installation,
    open_worlds,
)
from captrain.capabilities import kind_of
from captrain.contract import CheckedEnvironment, calls_of, tool_call
from captrain.records import JsonObject, Message, Rollout, Task, publish_text, read_json
from captrain.run import compose_spec

ROOT = Path(__file__).parents[1]
SEED = 33
BASIS = ["DB", "COMMUNICATE"]
"""Checks for tau2 tasks that do not name any."""
TAU2 = ("airline", "retail", "telecom")
WITH_REFERENCES = ("servicedesk", "calendar")
"""Benchmarks whose logs contain references. Logs of BFCL, AgentDojo and ToolSandbox have none."""
BARE = ("bfcl", "agentdojo", "toolsandbox")
"""Benchmarks whose logs name a task without its environment."""
SANDBOX = "CAPTRAIN_TOOLSANDBOX_PYTHON"
"""Variable with an interpreter that has ToolSandbox; captrain does not install it."""
SUSPECTS = {"airline": {"2", "9", "14", "23", "27", "29", "33", "35", "37", "38", "39", "44"}}
"""Tasks left out: a human reader found that policy or records contradict their solution."""
LOOKUPS = {"get_customer_by_phone": "phone_number", "get_details_by_id": "id"}
"""One-argument look-ups that no solution of telecom makes."""


class Spoken:
    """A task of an environment: its steps, the required answer, and its world."""

    def __init__(self, target: CheckedEnvironment, task: Task, world: World, reference: Sequence[Message]) -> None:
        self.target, self._task, self.world, self.owed = target, task, world, world.owed
        self.task = task.id.removeprefix(f"{target.name}/") if target.name in BARE else task.id
        self.solution = reference
        solution: list[PlantedStep] = []
        for message in self.solution:
            calls = calls_of(message)
            solution += [ReplayCall(*call) for call in calls] or [str(message["content"])]
        self.steps = tuple(solution)

    def play(self, steps: Sequence[PlantedStep]) -> Played:
        """Play steps from the start of the task."""
        actions: list[Message] = [
            tool_call(step.tool, step.arguments)
            if isinstance(step, ReplayCall)
            else {"role": "assistant", "content": step}
            for step in steps
        ]
        messages = self.target.play(self._task, actions)
        score = self.target.score(self._task, messages)
        results = [str(message["content"]) for message in messages if message["role"] == "tool"]
        results += [""] * (sum(isinstance(step, ReplayCall) for step in steps) - len(results))
        number = 0
        for message in messages:
            for call in message.get("tool_calls") or []:
                call["id"], number = f"call_{number}", number + 1
        for number, message in enumerate(message for message in messages if message["role"] == "tool"):
            message["tool_call_id"] = f"call_{number}"
        refusals = tuple(bool(re.match(r".{0,3}error|invalid", result, re.IGNORECASE)) for result in results)
        return Played(messages, tuple(results), refusals, score.success)


class Tau2:
    """A task of tau2. Its solution rarely looks anything up, so the look-ups of a careful agent are inserted."""

    def __init__(self, definition: JsonObject, world: World, lookups: dict[str, str]) -> None:
        self.definition, self.world, self.owed, self.task = definition, world, world.owed, str(definition["id"])
        parts = definition["user_scenario"]["instructions"]
        self.words = "\n".join(str(parts[name]) for name in ("reason_for_call", "known_info") if parts.get(name))
        self.steps = self._careful(lookups)

    def _careful(self, lookups: dict[str, str]) -> tuple[PlantedStep, ...]:
        """Return the reference, with look-ups that show the ids used by its changes."""
        history: list[ReplayCall] = []
        view = self.words

        def look(ids_of_call: Sequence[str], lacking: Sequence[str]) -> None:
            """Look up visible ids: the call's own, those that show a missing id, or all of them if the call names
            none."""
            nonlocal view
            tokens = dict.fromkeys(token for token in TOKEN.findall(view) if is_id(token) or "_" in token)
            calls = [ReplayCall(tool, {name: token}) for tool, name in lookups.items() for token in list(tokens)[:40]]
            calls = [call for call in calls if call not in history]
            for call, replayed in zip(
                calls, self.world.play([Replay((*history, call)) for call in calls]), strict=True
            ):
                (token,), result = call.arguments.values(), replayed.results[-1]
                is_wanted = (
                    not (ids_of_call or lacking) or token in ids_of_call or any(name in result for name in lacking)
                )
                if is_wanted and not replayed.failed[-1]:
                    history.append(call)
                    view += "\n" + result

        look((), ())
        for call in self.world.reference:
            ids = [leaf for leaf in leaves(call.arguments) if is_id(leaf)]
            for _ in range(2 if self.world.kinds.get(call.tool) == "write" else 0):
                lacking = [name for name in ids if name not in view]
                ids_of_call = [*(str(call.arguments[n]) for n in lookups.values() if n in call.arguments), *ids]
                if ids_of_call or lacking:
                    look(ids_of_call, lacking)
            history.append(call)
            view += "\n" + self.world.play([Replay(tuple(history))])[0].results[-1]
        steps: list[PlantedStep] = []
        for call in dict.fromkeys((call.tool, json.dumps(call.arguments), call.by) for call in history):
            call = ReplayCall(call[0], json.loads(call[1]), call[2])
            steps += [step for step in (request_of(call), call) if step]
        return (*steps, f"{CLOSING} {', '.join(self.owed)}".strip())

    def play(self, steps: Sequence[PlantedStep]) -> Played:
        """Play steps from the start of the task."""
        calls = tuple(step for step in steps if isinstance(step, ReplayCall))
        texts = tuple(step for step in steps if isinstance(step, str))
        (replayed,) = self.world.play([Replay(calls, texts)])
        messages: list[JsonObject] = [
            {"role": "assistant", "content": "Hi! How can I help you today?"},
            {"role": "user", "content": self.words},
        ]
        answers = zip(replayed.results, replayed.failed, strict=True)
        for number, step in enumerate(steps):
            if isinstance(step, str):
                messages.append({"role": "assistant", "content": step})
                continue
            if step.by != "user" and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
                messages.append({"role": "user", "content": "Yes, please."})
            call = {"id": f"call_{number}", "name": step.tool, "arguments": step.arguments, "requestor": step.by}
            messages.append({"role": step.by, "content": None, "tool_calls": [call]})
            result, failed = next(answers)
            answer = {"role": "tool", "id": call["id"], "content": result, "requestor": step.by, "error": failed}
            messages.append(answer)
        messages.append({"role": "user", "content": "###STOP###"})
        self.parts = replayed.parts
        return Played(messages, replayed.results, replayed.failed, replayed.passed)


Stage = Spoken | Tau2


def plant(
    stages: Sequence[Stage], per_class: int, rng: random.Random
) -> Iterator[tuple[Stage, str, Played, int | None, list[str]]]:
    """Yield untouched solutions (class "") and failures by class, with the message of each fault and its right
    causes."""
    tools, cases = Tools(), list[tuple[Stage, Case]]()
    for stage in stages:
        calls = tuple(step for step in stage.steps if isinstance(step, ReplayCall))
        if not calls or not (performance := stage.play(stage.steps)).passed:
            continue
        (replayed,) = stage.world.play([Replay(calls, stage.owed)])
        for tool in (tool for tool, kind in stage.world.kinds.items() if kind == "handover"):
            tools.handovers.add(tool)
            tools.arguments.setdefault(tool, frozenset() if isinstance(stage, Spoken) else frozenset({"summary"}))
        for call, writes in zip(calls, replayed.changed, strict=True):
            tools.add(call, writes and kind_of(call.tool) != "read", stage.world.kinds.get(call.tool))
        turns = (message for message in performance.messages if message["role"] == "user")
        words = "\n".join(str(message["content"]) for message in turns)
        cases.append((stage, Case(stage.steps, performance, words, tools, stage.owed, rng)))
    for stage, case in cases[: 2 * per_class]:
        yield stage, "", case.performance, None, []
    for name, (faults, causes) in CLASSES.items():
        number = 0
        for stage, case in rng.sample(cases, len(cases)):
            for planted in faults(case):
                performance = stage.play(planted.steps)
                is_refused = planted.call is not None and performance.failed[planted.call] and name not in REFUSABLE
                if not performance.passed and not is_refused:
                    messages = enumerate(performance.messages)
                    places = [place for place, message in messages for _ in message.get("tool_calls") or []]
                    message = None if planted.call is None else places[planted.call]
                    yield stage, name, performance, message, [*causes, *planted.accepted]
                    number += 1
                    break
            if number == per_class:
                break


def tau2_stages(worlds: Worlds, domain: str, count: int, rng: random.Random) -> list[Stage]:
    """Read the tasks of a domain from tau2's own file."""
    installed = made_installation("tau2")
    assert installed is not None
    file = Path(installed.data) / "tau2/domains" / domain / "tasks.json"
    definitions = read_json(file, list[JsonObject], "run `captrain benchmark install tau2`")
    criteria = [entry.get("evaluation_criteria") or {} for entry in definitions]
    lookups = dict(LOOKUPS) if domain == "telecom" else {}
    for action in (action for entry in criteria for action in entry.get("actions") or []):
        if action["name"].startswith("get_") and len(action["arguments"]) == 1:
            lookups[action["name"]] = next(iter(action["arguments"]))
    candidates = [entry for entry, c in zip(definitions, criteria, strict=True) if len(c.get("actions") or []) >= 1]
    candidates = [entry for entry in candidates if str(entry["id"]) not in SUSPECTS.get(domain, ())]
    stages: list[Stage] = []
    for entry in rng.sample(candidates, min(count, len(candidates))):
        definition = {name: entry[name] for name in ("initial_state", "evaluation_criteria") if entry.get(name)}
        data: JsonObject = {"kind": domain, "task": str(entry["id"]), "definition": definition}
        world = worlds.of(rollout_of(f"tau2/{domain}", str(entry["id"]), data))
        if world is not None:
            stages.append(Tau2(entry, world, lookups))
    return stages


def rollout_of(environment: str, task: str, data: JsonObject) -> Rollout:
    """Return a rollout of a task in which nothing has been done yet."""
    task_record = Task(id=f"{environment}/{task}", split="training", data=data)
    return Rollout(
        id=uuid.uuid4().hex,
        environment=environment,
        task=task_record,
        trial=0,
        purpose="diagnosis",
        policy="planted",
        messages=[],
        outcome="failed",
    )


def spoken_stages(target: CheckedEnvironment, worlds: Worlds, tasks: Sequence[Task]) -> list[Stage]:
    """Return stages for the tasks of an environment."""
    stages: list[Stage] = []
    for task in tasks:
        rollout = rollout_of("", task.id, {}).model_copy(update={"environment": target.name, "task": task})
        if (world := worlds.of(rollout)) is not None:
            stages.append(Spoken(target, task, world, worlds.reference(rollout)))
    return stages


def stages_of(benchmark: str, count: int, rng: random.Random) -> list[Stage]:
    """Return stages for a benchmark, by its name in a log."""
    if benchmark in TAU2:
        return tau2_stages(open_worlds("tau2"), benchmark, count, rng)
    if benchmark in BARE:
        python = os.environ.get(SANDBOX) if benchmark == "toolsandbox" else None
        overrides = [f"machine.benchmarks.toolsandbox.python={python}"] if python else []
        spec = compose_spec("default", 0, [f"benchmark={benchmark}", *overrides], ROOT / "conf")
        target = load_benchmark(spec.benchmark, spec.machine)
        tasks = target.tasks("training", target.size("training") or 0)
        tasks += target.tasks("discovery", target.size("discovery") or 0)
        worlds = open_worlds(benchmark, machine=spec.machine)
        return spoken_stages(target, worlds, rng.sample(tasks, min(count, len(tasks))))
    if benchmark == "calendar":  # the example of a new project
        module, source = ModuleType("calendar_desk"), ROOT / "src/captrain/projects/templates/calendar_desk.py.txt"
        exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), vars(module))
        target = CheckedEnvironment(module.CalendarDesk(), str(source), "")
        worlds = open_worlds(target=target)
    else:
        target, worlds = CheckedEnvironment(ServiceDesk(mix="mixed"), "servicedesk", ""), open_worlds("servicedesk")
    return spoken_stages(target, worlds, target.tasks("training", count))


def log_of(benchmark: str, rows: Sequence[tuple[Stage, int, Played]]) -> str:
    """Write a log in its benchmark's format, or as chats."""
    if benchmark not in TAU2:
        lines = list[str]()
        for stage, trial, performance in rows:
            row = {
                "task_id": stage.task,
                "trial": trial,
                "model": "planted",
                "reward": float(performance.passed),
                "messages": performance.messages,
            }
            if isinstance(stage, Spoken) and benchmark in WITH_REFERENCES:
                row["reference"] = stage.solution
            lines.append(json.dumps(row) + "\n")
        return "".join(lines)
    definitions = {stage.task: stage.definition for stage, _, _ in rows if isinstance(stage, Tau2)}
    simulations = [
        {
            "id": f"{benchmark}-{number}",
            "task_id": stage.task,
            "trial": trial,
            "termination_reason": "user_stop",
            "reward_info": {
                "reward": float(performance.passed),
                "reward_basis": definitions[stage.task]["evaluation_criteria"].get("reward_basis", BASIS),
            },
            "messages": performance.messages,
        }
        for number, (stage, trial, performance) in enumerate(rows)
    ]
    info = {"environment_info": {"domain_name": benchmark}, "agent_info": {"llm": "planted"}}
    return json.dumps({"info": info, "tasks": [*definitions.values()], "simulations": simulations})


BENCHMARKS = ("servicedesk", "calendar", "airline", "retail", "telecom", "bfcl", "agentdojo")
FURTHER = ("toolsandbox",)
"""Benchmarks that captrain does not install."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the logs and their truth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--benchmark",
        action="append",
        choices=(*BENCHMARKS, *FURTHER),
        help="all that captrain installs, where none is named",
    )
    parser.add_argument("--per-class", type=int, default=12, help="faults of each class in each benchmark, at most")
    parser.add_argument("--tasks", type=int, default=80, help="tasks of each benchmark that are planted in")
    options = parser.parse_args(arguments)
    truth: list[JsonObject] = []
    for benchmark in options.benchmark or BENCHMARKS:
        rng, trials = random.Random(f"{SEED}-{benchmark}"), Counter[str]()
        rows: list[tuple[Stage, int, Played]] = []
        counts = Counter[str]()
        file = f"planted_{benchmark}.{'json' if benchmark in TAU2 else 'jsonl'}"
        for stage, name, performance, message, causes in plant(
            stages_of(benchmark, options.tasks, rng), options.per_class, rng
        ):
            trial = trials[stage.task]
            trials[stage.task] += 1
            rows.append((stage, trial, performance))
            counts[name] += 1
            truth.append(
                {
                    "file": file,
                    "task_id": stage.task,
                    "trial": trial,
                    "class": name,
                    "primary": causes[0] if causes else None,
                    "accepted": causes,
                    "secondary": [],
                    "message": message,
                    "suspect_reference": False,
                }
            )
        publish_text(options.folder / file, log_of(benchmark, rows))
        print(f"{benchmark}: {counts.pop('', 0)} untouched, {counts.total()} faults: {dict(counts)}", flush=True)
    lines = "".join(json.dumps(row) + "\n" for row in truth)
    publish_text(options.folder / "truth.jsonl", lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
