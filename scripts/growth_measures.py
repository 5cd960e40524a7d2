"""Measures of `bench_growth`: the data of each, made in a folder, and the work that is done there.

Data are made by a scripted policy in the service desk, of rollouts that ship, again under other ids, or by draws; work
is what a stage does, files read and written included, or the arguments of a command.
"""

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "docs/examples/servicedesk.jsonl"
TRIALS = 4
RUNS = 10
SEED = 0


@dataclass(frozen=True)
class Measure:
    """One thing that grows. `prepare` makes its data in a folder, `work` is what is measured there, `command` the
    arguments of captrain that are measured in its place."""

    name: str
    unit: str
    largest: int
    prepare: Callable[[int, Path], None]
    work: Callable[[int, Path], None] | None = None
    command: tuple[str, ...] = ()


def shipped_rows() -> list[dict[str, object]]:
    """Read the rollouts that ship, as lines of a chat log."""
    return [json.loads(line) for line in SHIPPED.read_text().splitlines()]


def copies(size: int) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield shipped rollouts over and over: the number of each, and its line, with trials of a task side by side."""
    rows = shipped_rows()
    for number in range(size):
        row = rows[number % len(rows)]
        place = number // (TRIALS * len(rows)) * len(rows) + number % len(rows)
        yield number, {**row, "task_id": f"task-{place:06d}", "trial": number // len(rows) % TRIALS}


def prepare_chats(size: int, folder: Path) -> None:
    """Write a chat log, one rollout a line, as `captrain export` writes them."""
    with (folder / "log.jsonl").open("w") as file:
        for _, row in copies(size):
            file.write(json.dumps(row) + "\n")


def prepare_tau2(size: int, folder: Path) -> None:
    """Write the same rollouts as one result file of tau2: tasks with their gold actions, and simulations."""
    rows, names = shipped_rows(), {str(row["task_id"]) for _, row in copies(size)}
    with (folder / "log.json").open("w") as file:
        file.write('{"info": {"environment_info": {"domain_name": "desk"}}, "tasks": [')
        for number, name in enumerate(sorted(names)):
            gold = rows[int(name.removeprefix("task-")) % len(rows)]
            file.write(("," if number else "") + json.dumps({"id": name, "evaluation_criteria": criteria(gold)}))
        file.write('], "simulations": [')
        for number, row in copies(size):
            file.write(("," if number else "") + json.dumps(simulation(row)))
        file.write("]}")


def criteria(row: dict[str, object]) -> dict[str, object]:
    """Convert the gold actions of a shipped rollout to tau2's form."""
    calls = [
        call["function"] for message in objects(row["reference"]) for call in objects(message.get("tool_calls", []))
    ]
    actions = [{"name": call["name"], "arguments": json.loads(str(call["arguments"]))} for call in calls]
    return {"actions": actions, "communicate_info": []}


def objects(value: object) -> list[dict]:
    """Check that a value is a JSON list of objects."""
    assert isinstance(value, list)
    return value


def simulation(row: dict[str, object]) -> dict[str, object]:
    """Convert a shipped rollout to a simulation of tau2."""
    messages = []
    for message in objects(row["messages"]):
        calls = [call["function"] | {"id": call["id"]} for call in message.get("tool_calls", [])]
        result = {"id": message["tool_call_id"]} if message["role"] == "tool" else {}
        messages.append({"role": message["role"], "content": message["content"], "tool_calls": calls or None, **result})
    names = {key: row[key] for key in ("task_id", "trial")}
    return {**names, "termination_reason": "agent_stop", "reward_info": {"reward": row["reward"]}, "messages": messages}


def collect_rollouts(size: int, folder: Path) -> None:
    """Run the stage `rollouts`, with a policy that follows the reference on every second task."""
    from captrain.benchmarks import ServiceDesk
    from captrain.config import Component, build
    from captrain.contract import Target
    from captrain.ledger import ledger_entry
    from captrain.policies import Policy
    from captrain.records import publish, publish_json
    from captrain.rollouts import collect, summarise_rollouts

    target = Target(ServiceDesk(mix="mixed"), "servicedesk", "growth")
    script = {"_target_": "captrain.policies.scripted.ScriptedPolicy", "skill": 0.5}
    policy, tasks = build(Component.model_validate(script), Policy), target.tasks("discovery", size)
    rollouts = collect(policy, target, tasks, purpose="diagnosis", seed=SEED, journals=folder / "journals", quiet=True)
    publish(folder / "discovery.jsonl", rollouts)
    publish(folder / "ledger.jsonl", [ledger_entry(rollouts, stage="rollouts", method="trace")])
    publish_json(folder / "summary.json", summarise_rollouts(rollouts, target))


def write_rollouts(size: int, path: Path) -> None:
    """Write rollouts of discovery, in the project's own format."""
    from captrain.interop import read_logs
    from captrain.records import digest

    with tempfile.TemporaryDirectory() as folder:
        prepare_chats(len(shipped_rows()), Path(folder))
        rollouts = [*read_logs([Path(folder) / "log.jsonl"]).rollouts]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for number, row in copies(size):
            rollout = rollouts[number % len(rollouts)]
            task = rollout.task.model_copy(update={"id": str(row["task_id"])})
            update = {"id": digest("growth", number)[:12], "task": task, "trial": row["trial"]}
            file.write(rollout.model_copy(update=update).model_dump_json(exclude_defaults=True) + "\n")


def prepare_rollouts(size: int, folder: Path) -> None:
    write_rollouts(size, folder / "discovery.jsonl")


def label_rollouts(size: int, folder: Path) -> None:
    """Run the stage `labels`, with the programmatic analyst."""
    from captrain.benchmarks import TOOLS
    from captrain.capabilities import ProgrammaticAnalyst, label_runs, measure_agreement
    from captrain.records import Rollout, load, publish, publish_json

    analyst, rollouts = ProgrammaticAnalyst(), load(folder / "discovery.jsonl", Rollout)
    candidates, labels = label_runs(analyst, rollouts, TOOLS, RUNS, SEED)
    publish(folder / "labels.jsonl", labels)
    publish(folder / "candidates.jsonl", candidates)
    publish_json(folder / "agreement.json", measure_agreement(analyst, labels, rollouts, TOOLS))


def write_labels(rollouts: int, capabilities: int, folder: Path) -> None:
    """Write labels of all runs, and the candidates. A rollout shows a few capabilities, however many there are."""
    from captrain.records import Capability, Label, RolloutLabels, publish

    names = [f"capability_{number:05d}" for number in range(capabilities)]
    publish(folder / "candidates.jsonl", [Capability(id=name, name=name, description="Does it.") for name in names])
    draw = random.Random(SEED)
    rows = [(draw.random() < 0.5, [draw.randrange(capabilities) for _ in range(TRIALS)]) for _ in range(rollouts)]
    absent = Label(verdict="NA", evidence="no occasion")

    def runs() -> Iterator[RolloutLabels]:
        for run in range(RUNS):
            for number, (passed, places) in enumerate(rows):
                lacking = Label(verdict="PRESENT" if passed else "LACKING", evidence="an occasion", message=2)
                labels = dict.fromkeys(names, absent) | {names[place]: lacking for place in places}
                outcome = "passed" if passed else "failed"
                yield RolloutLabels(run=run, rollout=f"r{number:06d}", outcome=outcome, count=1, labels=labels)

    publish(folder / "labels.jsonl", runs())


def prepare_labels(size: int, folder: Path) -> None:
    write_labels(max(1, size // RUNS), 16, folder)


def prepare_candidates(size: int, folder: Path) -> None:
    write_labels(20, size, folder)


def select_capabilities(size: int, folder: Path) -> None:
    """Run the stage `capabilities`."""
    from captrain.capabilities import select, stability_table
    from captrain.config import Selection
    from captrain.records import Capability, RolloutLabels, load, publish, publish_json, publish_text

    labels = load(folder / "labels.jsonl", RolloutLabels)
    limits = Selection(delta=0.2, coverage=0.01, agreement=8, confidence=0.95, floor=0.0, resamples=1000)
    selected = select(labels, load(folder / "candidates.jsonl", Capability), limits, 4, SEED)
    publish_json(folder / "selection.json", selected.report)
    publish(folder / "capabilities.jsonl", selected.capabilities)
    publish_text(folder / "stability.csv", stability_table(selected.report).to_csv(index=False))


def prepare_nothing(size: int, folder: Path) -> None:
    """Prepare nothing: what is measured makes its own input."""


def route_tasks(size: int, folder: Path) -> None:
    """Ask the routers of the stage `routes` for so many test tasks and four capabilities."""
    route(4, size, folder)


def route_to_capabilities(size: int, folder: Path) -> None:
    """Ask the routers for a hundred test tasks and so many capabilities."""
    route(size, 100, folder)


def route(capabilities: int, size: int, folder: Path) -> None:
    """Route openings of the service desk by examples of known route, as many of each as an environment gives."""
    from captrain.benchmarks import ServiceDesk
    from captrain.contract import Target
    from captrain.records import publish_json
    from captrain.routing import OPENINGS, Example, RetrievalRouter, SetRouter, openings

    target = Target(ServiceDesk(mix="mixed"), "servicedesk", "growth")
    texts = openings(target, target.tasks("training", OPENINGS * capabilities))
    examples = [Example(text, f"capability_{number % capabilities}") for number, text in enumerate(texts)]
    tasks = openings(target, target.tasks("test", size))
    routers = RetrievalRouter(neighbours=5), RetrievalRouter(neighbours=20, p=0.9), SetRouter()
    publish_json(folder / "routes.json", [router.route(examples, tasks) for router in routers])


def write_outcomes(tasks: int, adapters: int, folder: Path) -> None:
    """Write outcomes of the base, doing nothing, one baseline and the adapters, and routes among them."""
    import pandas as pd

    draw = random.Random(SEED)
    names = [f"adapter_{number:04d}" for number in range(adapters)]
    stages = {"idle": "", "base": "", "grpo_target": "grpo_target", **dict.fromkeys(names, "adapters")}
    rows = []
    for arm, stage in stages.items():
        for task in range(tasks):
            for trial in range(TRIALS):
                reward = float(arm != "idle" and draw.random() < 0.5)
                outcome = "passed" if reward else "failed"
                rows.append((f"t{task:06d}", f"kind {task % 6}", arm, stage, trial, outcome, reward))
    columns = ["task", "kind", "arm", "stage", "trial", "outcome", "reward"]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "outcomes.csv", index=False)
    columns_of = {name: [draw.choice(names) for _ in range(tasks)] for name in ("retrieval", "sets", "chosen")}
    frame = {"task": [f"t{task:06d}" for task in range(tasks)], "kind": "any", **columns_of}
    pd.DataFrame(frame).to_csv(folder / "routes.csv", index=False)


def prepare_tasks(size: int, folder: Path) -> None:
    write_outcomes(size, 4, folder)


def prepare_arms(size: int, folder: Path) -> None:
    write_outcomes(100, size, folder)


def compare_methods(size: int, folder: Path) -> None:
    """Make the tables of the stage `evaluation`."""
    from captrain.comparison import evaluate, publish_evaluation
    from captrain.ledger import LedgerEntry
    from captrain.records import read_table

    outcomes = read_table(folder / "outcomes.csv", words=True).fillna({"kind": ""})
    ledger = [
        LedgerEntry(stage="rollouts", purpose="diagnosis", method="trace", rollouts=40),
        LedgerEntry(stage="adapters", purpose="training", method="trace", rollouts=60),
        LedgerEntry(stage="grpo_target", purpose="training", method="grpo_target", rollouts=100),
    ]
    routes = read_table(folder / "routes.csv", words=True, kinds=str).fillna("")
    limits = {"resamples": 2000, "confidence": 0.95, "seed": SEED}
    publish_evaluation(evaluate(outcomes, routes, ledger, ranked=[], controls={}, **limits), folder / "evaluation")


def prepare_project(size: int, folder: Path) -> None:
    """Prepare a project with the committed results, and rollouts of discovery and of the evaluation in equal parts."""
    from captrain.capabilities import ProgrammaticAnalyst, label_runs
    from captrain.records import Rollout, digest, load, read_index

    shutil.copytree(ROOT / "results", folder / "results", ignore=shutil.ignore_patterns("sweeps", "studies"))
    for name in ("dvc.yaml", "dvc.lock"):
        shutil.copy(ROOT / name, folder / name)
    adapters = read_index(folder / "results/adapters/index.json")
    arms = [None, *(entry.digest for entry in adapters.values())]
    discovery, tests = folder / "artifacts/rollouts/discovery.jsonl", folder / "artifacts/evaluation/rollouts.jsonl"
    write_rollouts(size // 2, discovery)
    write_rollouts(size - size // 2, tests)
    lines = [*islice(discovery.open(), len(shipped_rows()))]
    (folder / "seed.jsonl").write_text("".join(lines))
    with tests.with_suffix(".tmp").open("w") as file, tests.open() as rollouts:
        for number, line in enumerate(rollouts):
            row = json.loads(line)
            row["task"] |= {"id": f"test/{row['task']['id']}", "split": "test"}
            row |= {
                "id": digest("test", number)[:12],
                "adapter": arms[number // len(lines) % len(arms)],
                "purpose": "evaluation",
            }
            file.write(json.dumps(row) + "\n")
    tests.with_suffix(".tmp").replace(tests)
    rollouts = load(folder / "seed.jsonl", Rollout)
    _, rows = label_runs(ProgrammaticAnalyst(), rollouts, [], 1, SEED)
    labels_of = {row.rollout: row for row in rows}
    (folder / "artifacts/labels").mkdir(parents=True)
    with (folder / "artifacts/labels/labels.jsonl").open("w") as file:
        for run in range(RUNS):
            for number in range(size // 2):
                row = labels_of[rollouts[number % len(rollouts)].id]
                update = {"run": run, "rollout": digest("growth", number)[:12]}
                file.write(row.model_copy(update=update).model_dump_json(exclude_defaults=True) + "\n")


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("rollouts collected", "tasks", 6400, prepare_nothing, collect_rollouts),
        Measure("rollouts labelled", "rollouts", 12800, prepare_rollouts, label_rollouts),
        Measure("labels selected from", "labels of a rollout", 128000, prepare_labels, select_capabilities),
        Measure("candidates selected from", "capabilities", 3200, prepare_candidates, select_capabilities),
        Measure("tasks routed", "test tasks", 12800, prepare_nothing, route_tasks),
        Measure("capabilities routed to", "capabilities", 64, prepare_nothing, route_to_capabilities),
        Measure("tasks compared", "test tasks", 12800, prepare_tasks, compare_methods),
        Measure("adapters compared", "capabilities", 640, prepare_arms, compare_methods),
        Measure("chat log", "rollouts", 100_000, prepare_chats, command=("diagnose", "log.jsonl", "--out", "out")),
        Measure("tau2 log", "rollouts", 100_000, prepare_tau2, command=("diagnose", "log.json", "--out", "out")),
        Measure("report", "rollouts", 100_000, prepare_project, command=("report", "--out", "out")),
    )
}
