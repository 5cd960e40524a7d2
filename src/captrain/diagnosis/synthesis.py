"""Makes an environment that trains a capability found by a diagnosis, for `captrain synthesize`.

Briefs, synthesizers and passports are the pipeline's (`captrain.environments`); only the source of the evidence
differs. The target is the project's benchmark if it has the tools in the logs; a program then derives the environment
from it. Other logs need the tools' schemas and a language model, and the environment must not repeat their own tasks.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from captrain import environments
from captrain.agents import PolicySource
from captrain.benchmarks import load_benchmark
from captrain.contract import CheckedEnvironment, calls_of
from captrain.diagnosis.diagnosis import Diagnosis
from captrain.errors import UserError
from captrain.records import Capability, JsonObject, Message, Rollout, counted, digest, load, read_json
from captrain.run import (
    Component,
    ModelAccess,
    Spec,
    alternatives,
    build,
    compose_configuration,
    compose_spec,
    find_project,
    shipped,
    user_outputs,
)

MOST = 1000
"""Maximum number of tasks held out, because all word sequences of each are in memory."""
Writer = Literal["program", "model"]
SYNTHESIZER = "captrain.environments.openai.OpenAISynthesizer"
PROGRAM = "captrain.environments.templates.TemplateSynthesizer"
CHARACTERS, LONGEST = 24000, 16000
"""Most characters of all examples, and of the system prompt; most tokens of an answer, which holds a whole file."""
PER_TOKEN = 4
"""Approximate number of characters in a token."""
RULES = 9000
"""Approximate number of characters of a question without its examples."""


@dataclass(frozen=True)
class AskingCost:
    """Estimated cost of asking: questions, tokens and money. `most`: whether it is an upper bound."""

    questions: int
    prompt_tokens: int
    completion_tokens: int
    access: ModelAccess
    most: bool = False

    @property
    def money(self) -> str:
        """The price in words; "" if prices are unknown."""
        if self.access.input_price is None or self.access.output_price is None:
            return ""
        prompt, completion = (
            self.prompt_tokens * self.access.input_price,
            self.completion_tokens * self.access.output_price,
        )
        return f"{(prompt + completion) / 1e6:.2f} in money"

    def __str__(self) -> str:
        price = f", {self.money}" if self.money else ""
        return (
            f"{'at most' if self.most else 'about'} {counted(self.questions, 'question')}, {self.prompt_tokens} "
            f"tokens read and {self.completion_tokens} written{price}; answers on disk cost nothing"
        )


@dataclass
class LoggedEpisode:
    """The user messages that open a logged task; a system prompt belongs to no task."""

    messages: list[Message]

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """Refuse: a log cannot be continued.

        Raises:
            UserError: always.
        """
        raise UserError("a logged task cannot be played", "bring its benchmark")


class LoggedTasks:
    """Logged tasks as a benchmark; the first rollout of each task represents it.

    Args:
        rollouts: of the logs.
        tools: schemas of the tools.
    """

    name = "logs"

    def __init__(self, rollouts: Sequence[Rollout], tools: list[JsonObject]) -> None:
        self.tools = tools
        self._rollouts: dict[str, Rollout] = {}
        for rollout in rollouts:
            if len(self._rollouts) < MOST:
                self._rollouts.setdefault(rollout.task.id, rollout)

    def size(self, split: str) -> int:
        """Return the number of tasks of a split. All are in the test split, because no environment may repeat them."""
        return len(self._rollouts) if split == "test" else 0

    def tasks(self, split: str, count: int) -> list[JsonObject]:
        """Return the first `count` tasks of a split."""
        tasks = [rollout.task for rollout in self._rollouts.values()]
        return [{"id": task.id, "split": split, "data": task.data} for task in tasks[: min(count, self.size(split))]]

    def open(self, task: JsonObject) -> LoggedEpisode:
        """Open a task with its first user messages."""
        opening = takewhile(lambda message: message["role"] != "assistant", self._rollouts[task["id"]].messages)
        return LoggedEpisode([message for message in opening if message["role"] == "user"])

    def score(self, task: JsonObject, messages: list[Message]) -> JsonObject:
        """Refuse: logged tasks cannot be scored.

        Raises:
            UserError: always.
        """
        raise UserError("a logged task cannot be judged", "bring its benchmark")

    def reference(self, task: JsonObject) -> list[Message]:
        """Return the solution in the log."""
        return self._rollouts[task["id"]].reference


@dataclass(frozen=True)
class SynthesisInputs:
    """Inputs of a synthesis.

    capabilities: by id. tool_names: the tools that the rollouts call. tools: the known schemas. project: the
    surrounding project, if any. is_of_project: whether the evidence is the project's own.
    """

    capabilities: dict[str, Capability]
    rollouts: Sequence[Rollout]
    tool_names: frozenset[str]
    tools: list[JsonObject]
    project: Path | None
    is_of_project: bool = False

    def without_schema(self, tools: list[JsonObject]) -> list[str]:
        """Return the called tools without a schema in this list."""
        return sorted(self.tool_names - {tool["function"]["name"] for tool in tools})


@dataclass(frozen=True)
class SynthesisOrder:
    """An environment to make: settings, brief, the standard that it must meet, and its synthesizer."""

    spec: Spec
    brief: "environments.Brief"
    standard: "environments.Standard"
    synthesizer: "environments.Synthesizer"


def read_diagnosis(diagnosis: Path, tools: Path | None = None) -> SynthesisInputs:
    """Read the output folder of `captrain diagnose`.

    Args:
        diagnosis: the folder.
        tools: a JSON list of schemas in OpenAI's format, to replace those of the logs.

    Raises:
        UserError: the folder holds no diagnosis, or the file no list of schemas.
    """
    if not (diagnosis / "candidates.jsonl").is_file() or not (diagnosis / "tools.json").is_file():
        raise UserError(f"{diagnosis} holds no diagnosis of logs", "run `captrain diagnose FILES --out DIR`, name DIR")
    capabilities = load(diagnosis / "candidates.jsonl", Capability)
    remedy = 'a JSON list of {"type": "function", "function": {"name": ..., "parameters": {...}}}'
    schemas = read_json(tools or diagnosis / "tools.json", list[JsonObject], remedy)
    if not all(isinstance((tool.get("function") or {}).get("name"), str) for tool in schemas):
        raise UserError(f"{tools or diagnosis / 'tools.json'} is no list of schemas", remedy)
    rollouts = load(diagnosis / "rollouts.jsonl", Rollout)
    messages = (message for rollout in rollouts for message in rollout.messages if message["role"] == "assistant")
    names = frozenset(name for message in messages for name, _ in calls_of(message))
    return SynthesisInputs(
        {entry.id: entry for entry in capabilities}, rollouts, names, schemas, find_project(Path.cwd())
    )


def read_project_diagnosis(project: Path) -> SynthesisInputs:
    """Read the capabilities that a project's own diagnosis selected.

    Raises:
        UserError: the project has none yet.
    """
    selected = project / "results/capabilities/capabilities.jsonl"
    rollouts = project / "artifacts/rollouts/discovery.jsonl"
    if not selected.is_file() or not rollouts.is_file():
        raise UserError("the project has no capabilities yet", "run `dvc repro capabilities`, or name --diagnosis DIR")
    capabilities = {entry.id: entry for entry in load(selected, Capability)}
    return SynthesisInputs(capabilities, load(rollouts, Rollout), frozenset(), [], project, is_of_project=True)


def possible_writers(diagnosis: Diagnosis) -> dict[str, Writer]:
    """Return candidate -> who can write its environment, for a diagnosis that is not yet on disk.

    A program is preferred to a language model. Candidates that neither can write are missing. Errors of the surrounding
    project are not reported here.
    """
    writers: dict[str, Writer] = {}
    if (labels := diagnosis.labels) is None:
        return writers
    rollouts = [rollout for entries in labels.examples.values() for rollout in entries]
    names = frozenset(tool["function"]["name"] for tool in diagnosis.logs.tools)
    evidence = SynthesisInputs({}, rollouts, names, diagnosis.logs.known_tools, find_project(Path.cwd()))
    spec, benchmark = None, None
    if evidence.project is not None:  # elsewhere there is no benchmark, and composing takes long
        try:
            spec = _configuration(evidence.project)
            benchmark = _benchmark(evidence, spec, is_program=True)
        except Exception:  # a project's benchmark may be any code
            spec, benchmark = None, None
    for capability in labels.candidates:
        if benchmark is not None or not evidence.without_schema(evidence.tools):
            writers[capability.id] = "model"
        if spec is not None and benchmark is not None:
            with suppress(environments.NoTemplate):
                program = _synthesizer("", ModelAccess())
                program.synthesize(environments.make_brief(capability, benchmark.tools, rollouts, spec.benchmark), [])
                writers[capability.id] = "program"
    return writers


def order_synthesis(
    evidence: SynthesisInputs, name: str, model: str, access: ModelAccess, sandbox: str | None = None
) -> SynthesisOrder:
    """Prepare the synthesis of an environment for a capability.

    Args:
        evidence: of the diagnosis.
        name: the capability's id.
        model: a language model's name at its endpoint; "": a program derives the environment.
        access: how to ask the model.
        sandbox: least level of confinement; None: the project's.

    Raises:
        UserError: there is no such capability, its failures show nothing that a program could train, or schemas,
            benchmark or model are missing.
    """
    if name not in evidence.capabilities:
        raise UserError(f"the diagnosis has no capability {name}", alternatives(name, evidence.capabilities))
    spec, capability = _configuration(evidence.project), evidence.capabilities[name]
    if sandbox:
        spec = spec.model_copy(update={"machine": spec.machine.model_copy(update={"sandbox": sandbox})})
    benchmark = _benchmark(evidence, spec, is_program=not model)
    remedy = "or run the command in the project of the logs' benchmark"
    if benchmark is None and (unknown := evidence.without_schema(evidence.tools)):
        raise UserError(
            f"the schemas of {counted(len(unknown), 'tool')} are missing, such as {unknown[0]}",
            f"pass a JSON file of schemas with --tools FILE, {remedy}",
        )
    if benchmark is None and not model:
        raise UserError(
            "captrain cannot derive this environment by a program: this folder is not a project of the logs' benchmark",
            f"let a language model write it with --model MODEL, {remedy}",
        )
    logged = LoggedTasks(evidence.rollouts, evidence.tools)
    target = benchmark or CheckedEnvironment(logged, "the logs", digest([rollout.id for rollout in evidence.rollouts]))
    standard = environments.make_standard(
        target, spec.evaluation.tasks if benchmark else logged.size("test"), spec.environments
    )
    brief = environments.make_brief(capability, target.tools, evidence.rollouts, spec.benchmark if benchmark else None)
    return SynthesisOrder(spec, brief, standard, _synthesizer(model, access))


def synthesis_cost(order: SynthesisOrder, access: ModelAccess) -> AskingCost:
    """Return an upper bound on the cost: one question per round, and an earlier file in each later round."""
    texts = [str(message.get("content") or "") for rollout in order.brief.examples for message in rollout.messages]
    length = min(2 * CHARACTERS, sum(map(len, texts))) + len(str(order.brief.tools))
    rounds = order.standard.bounds.rounds
    read = rounds * ((RULES + length) // PER_TOKEN) + (rounds - 1) * LONGEST
    return AskingCost(rounds, read, rounds * LONGEST, access, most=True)


def synthesize_ordered(
    order: SynthesisOrder, base: Path | None, out: Path
) -> "tuple[environments.SynthesisResult, Path]":
    """Synthesize an environment, check every attempt, and write environment, passport and page.

    Args:
        order: what to make, and who writes it.
        base: the project's base, which plays the environment; None skips the checks that need it.
        out: the folder.

    Returns:
        The outcome, and the environment's path: in `rejected/` if it earned no passport.

    Raises:
        UserError: as `captrain.environments.synthesize`.
    """
    policy = PolicySource(order.spec.exploring(), base, order.spec.machine) if base is not None else None
    result = environments.synthesize(
        order.brief, order.synthesizer, policy, order.standard, order.spec.machine, order.spec.seed
    )
    with user_outputs(out) as aside:
        environments.publish_environments([result], aside, aside, required=False)
    name = f"{result.capability.id}.py"
    return result, out / name if result.passed else out / "rejected" / name


def _configuration(project: Path | None) -> Spec:
    """Return the configuration of a project; outside a project, captrain's own."""
    if project is not None:
        return compose_configuration([], project)[0]
    return compose_spec("default", 0, [], shipped("conf"))


def _benchmark(evidence: SynthesisInputs, spec: Spec, *, is_program: bool) -> CheckedEnvironment | None:
    """Return the project's benchmark if the environment can be derived from it; else None.

    It can if the evidence is the project's own, or if the benchmark has every tool in the logs and allows derived
    environments.

    Raises:
        UserError: the evidence is the project's own, and its benchmark does not load or allows no derived environment.
    """
    if evidence.project is None:
        return None
    try:
        if spec.benchmark.target != environments.EMBEDDED and (is_program or not evidence.is_of_project):
            environments.derivable(spec.benchmark)
        benchmark = load_benchmark(spec.benchmark, spec.machine)
    except UserError:
        if evidence.is_of_project:
            raise
        return None
    return None if evidence.without_schema(benchmark.tools) else benchmark


def _synthesizer(model: str, access: ModelAccess) -> "environments.Synthesizer":
    settings: dict[str, object] = {"_target_": PROGRAM}
    if model:
        settings = {"_target_": SYNTHESIZER, "name": model, "temperature": 1.0, "max_tokens": LONGEST}
    return build(Component.model_validate(settings), environments.Synthesizer, access=access)
