"""What a configuration will cost, and whether it can run at all, before anything is spent.

Counts follow from the settings, but for one thing that nobody knows beforehand: how many attempts each environment
needs to earn its passport. So everything is worked out for one attempt each and for `environments.rounds`, and shown
as a range; `capabilities.count` capabilities are taken to be selected. All else is an estimate, and every number that
it rests on is shown with where it comes from.

    diagnosis    rollouts.tasks x rollouts.trials
    calibration  capabilities x attempts x environments.groups x environments.group_size
    training     capabilities x adapters.rollouts
    baseline     these three together
    evaluation   (base + capabilities + baseline) x evaluation.tasks x evaluation.trials
    tokens       rollouts x those of one; questions x those of one
    wall         embedded base: rollouts / (rollouts a CPU second x workers); served model: the longest of
                   computing  (new / prefill + written / decode + 4 x trained / prefill) / GPUs, where a token of a
                              dialogue is new once, and trained on in each epoch
                   waiting    rollouts / episodes at once x tokens written in one / tokens a second of one request
                   host       rollouts x seconds of the benchmark's worker / its processes
    GPU-hours    GPUs x wall: they are held while episodes wait
    memory       copies x 2 bytes x parameters / GPUs                                       weights, bfloat16
    of a GPU     + 4 bytes x layers x KV heads x head x longest x episodes / min(GPUs, KV heads)        KV cache
                 and in training, where there are 2 copies, the sampler's and the trainer's, in place of 1
                 + 16 bytes x LoRA parameters                                 with gradients and AdamW, float32
                 + longest x (2 x layers x hidden + 34 x hidden + 8 x vocabulary) bytes      one sequence: checkpointed
                                                                              activations, one layer's own, logits
    money        (read x input_price + written x output_price) / 1e6, for what is not the agent's own model
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from captrain.assumptions import (
    ACTIVE,
    ANALYST,
    DECODE,
    DEMONSTRATIONS,
    EPISODES,
    FILE,
    FRAME,
    LABEL,
    LOCAL,
    POOL,
    PREFILL,
    RATES,
    SERVED,
    SIZES,
    STREAM,
    SYNTHESIZER,
    TRAINED,
    USABLE,
    Episode,
    Took,
    size_of,
    splits,
)
from captrain.components import nested
from captrain.errors import UserError
from captrain.spec import Component, Spec, choice, compose


@dataclass(frozen=True)
class Node:
    """The GPUs that are planned with: how many, GiB of each, and tokens a second of each, read and written; and the
    parameters of the model in billions, where its size is not known."""

    gpus: int = 8
    memory: float = 80.0
    throughput: tuple[float, float] | None = None
    parameters: float | None = None

    def __post_init__(self) -> None:
        stated = {"--gpus": [self.gpus], "--gpu-memory": [self.memory], "--throughput": self.throughput or [1]}
        for name, values in {**stated, "--parameters": [1 if self.parameters is None else self.parameters]}.items():
            if not all(0 < value < math.inf for value in values):
                raise UserError(
                    f"{name} = {' '.join(map(str, values))} cannot be planned with", "state what is above 0"
                )


@dataclass(frozen=True)
class Work:
    """One stage. Seconds on the wall, GiB of one GPU and money are None where they are not known."""

    stage: str
    jobs: int = 0
    rollouts: float = 0
    took: Took = Took()
    gpus: int = 0
    memory: float | None = 0
    seconds: float | None = 0
    money: float | None = 0

    @property
    def gpu_hours(self) -> float | None:
        """Of the GPUs that are held."""
        return None if self.seconds is None else self.gpus * self.seconds / 3600


@dataclass(frozen=True)
class Plan:
    """Stages with one attempt at each environment (`low`) and with all (`high`); what that rests on, as (what, value,
    where from); what to know; and what makes the settings impossible."""

    title: str
    low: list[Work]
    high: list[Work]
    assumptions: list[tuple[str, str, str]]
    warnings: list[str]
    problems: list[UserError]

    def refuse(self) -> None:
        """End here if the settings are impossible.

        Raises:
            UserError: all that makes them so.
        """
        if self.problems:
            problem = "\n       ".join(one.problem for one in self.problems)
            raise UserError(problem, "\n          ".join(one.remedy for one in self.problems))


def composed(settings: Sequence[str], root: Path) -> tuple[Spec, str]:
    """The configuration that params.yaml selects, with settings on top, and what it is called.

    Args:
        settings: key=value, as in `overrides` of params.yaml; experiment=NAME and seed=NUMBER choose others.
        root: of the project.

    Raises:
        UserError: it does not compose.
    """
    chosen = choice(root / "params.yaml")
    given = {key: value for key, _, value in (one.partition("=") for one in settings) if key in ("experiment", "seed")}
    if not (seed := given.get("seed", str(chosen.seed))).isdecimal():
        raise UserError(f"seed = {seed!r} is not a number", "write, for example, seed=42")
    overrides = [*chosen.overrides, *(one for one in settings if one.partition("=")[0] not in given)]
    experiment = given.get("experiment", chosen.experiment)
    title = ", ".join([f"experiment {experiment}", f"seed {seed}", *overrides])
    return compose(experiment, int(seed), overrides, root / "conf"), title


def plan(spec: Spec, node: Node, title: str = "") -> Plan:
    """Work out a configuration; nothing is started, asked or written."""
    low, high = Estimate(spec, node, 1), Estimate(spec, node, spec.environments.rounds)
    problems = [*_temperature(spec), *_tasks(spec, low.trace), *_memory(low)]
    works = low.works(), high.works()
    return Plan(title, *works, low.assumptions(), low.warnings(works[0][-1].money), problems)


class Estimate:
    """A configuration on a node, with so many attempts at each environment (their mean need not be whole)."""

    def __init__(self, spec: Spec, node: Node, attempts: float) -> None:
        self.spec, self.node, self.attempts, self.count = spec, node, attempts, spec.capabilities.count
        self.local, self.served = spec.policy.target == LOCAL, spec.policy.target == SERVED
        self.policy, self.trainer = spec.policy.settings(), spec.trainer.settings()
        self.user = nested("benchmark.user", spec.benchmark.settings().get("user"))
        self.episode = EPISODES.get((spec.benchmark.target, spec.policy.target), Episode())
        if self.user is None or self.user.target != SERVED:
            self.episode = self.episode._replace(user=Took())
        self.model = str(self.policy.get("name")).partition("@")[0]
        self.size = size_of(node.parameters * 1e9) if node.parameters else SIZES.get(self.model)
        scale = ACTIVE / self.size.active if self.size else 1
        self.prefill, self.decode = node.throughput or (PREFILL * scale, DECODE * scale)
        self.timed = node.throughput is not None or self.size is not None
        installed = spec.machine.benchmarks.get(spec.benchmark.target.split(".")[-2])
        self.processes = installed.processes if installed else 1
        self.batch = 256 if spec.machine.batch >= 256 else 64
        self.diagnosis = spec.rollouts.tasks * spec.rollouts.trials
        self.calibration = self.count * attempts * spec.environments.groups * spec.environments.group_size
        self.training = self.count * spec.adapters.rollouts
        self.trace = self.diagnosis + self.calibration + self.training

    def works(self) -> list[Work]:
        """The stages that cost anything, and their total."""
        spec, arms = self.spec, self.count + 2
        tests = arms * spec.evaluation.tasks * spec.evaluation.trials
        stages = [
            Work("base", 1, seconds=spec.base.steps * spec.base.batch / DEMONSTRATIONS),
            self._played("rollouts", self.diagnosis, user=True),
            self._asked(Work("labels", 1), spec.analyst, self._labelling(), spec.machine.asking.concurrency),
            self._asked(self._played("environments", self.calibration, self.count), spec.synthesizer, self._writing()),
            self._played("adapters", self.training, self.count, spec.machine.workers, training=True),
            self._played("baselines", self.trace, user=True, training=True),
            self._played("evaluation", tests, arms, spec.machine.workers, user=True),
        ][spec.base.model is not None :]
        return [*stages, _total(stages)]

    def _played(
        self, stage: str, rollouts: float, jobs: int = 1, workers: int = 1, *, user: bool = False,
        training: bool = False,
    ) -> Work:  # fmt: skip
        """A stage that plays; `user`: in the benchmark itself, with its worker and its simulated user."""
        one = self.episode if user else self.episode._replace(user=Took(), host=0)
        parallel = min(jobs, workers)
        work = Work(stage, jobs, rollouts, one.agent.plus(one.user).times(rollouts))
        if self.episode == Episode() or not (self.local or self.served):
            return replace(work, seconds=None)
        if self.local:
            rate = TRAINED if training else RATES[self.policy["precision"], self.batch]
            return replace(work, seconds=rollouts / rate * math.ceil(jobs / parallel) / jobs)
        bought = user and self.user is not None and self._elsewhere(self.user.settings())
        here = one.agent if bought else one.agent.plus(one.user)
        trained = one.agent.new * self.trainer.get("epochs", 1) if training else 0
        computing = rollouts * (here.new / self.prefill + here.written / self.decode + 4 * trained / self.prefill)
        turns = max(1, rollouts / (self.spec.machine.batch * parallel))
        waiting = turns * (one.agent.written + one.user.written) / STREAM
        seconds = max(computing / self.node.gpus, waiting, rollouts * one.host / self.processes)
        return replace(
            work, gpus=self.node.gpus, memory=self.memory(training), seconds=seconds if self.timed else None,
            money=self._price(one.user.times(rollouts)) if bought else 0,
        )  # fmt: skip

    def _asked(self, work: Work, component: Component, took: Took, at_once: int = 1) -> Work:
        """A stage with the questions of its analyst or synthesizer added."""
        if not took.calls:
            return work
        asking = self.spec.machine.asking
        bought = self._elsewhere(component.settings()) or asking.input_price is not None
        waiting = took.written / STREAM / min(at_once, took.calls)
        computing = 0 if bought else (took.new / self.prefill + took.written / self.decode) / self.node.gpus
        known = work.seconds is not None and (bought or self.timed)
        seconds = (work.seconds or 0) + max(waiting, computing)
        return replace(
            work, took=work.took.plus(took), seconds=seconds if known else None,
            gpus=work.gpus if bought else self.node.gpus, memory=work.memory if bought else self.memory(False),
            money=self._price(took) if bought else 0,
        )  # fmt: skip

    def _labelling(self) -> Took:
        """All questions of an analyst: what it proposes from, one merging, and every rollout in every run."""
        if self.spec.analyst.target != ANALYST:
            return Took()
        settings, runs = self.spec.analyst.settings(), self.spec.labels.runs
        one, labels = settings.get("characters", 16_000) / 4, runs * self.diagnosis
        shown = settings.get("failed", 4) + settings.get("passed", 4)
        proposed = runs * settings.get("proposals", 8) * LABEL
        read = runs * (shown * one + FRAME) + proposed + labels * (one + FRAME)
        return Took(runs + 1 + labels, read, read, 2 * proposed + labels * POOL * LABEL)

    def _writing(self) -> Took:
        """All questions of a synthesizer; every one but the first shows the file before."""
        if self.spec.synthesizer.target != SYNTHESIZER:
            return Took()
        calls, shown = self.count * self.attempts, self.spec.synthesizer.settings().get("characters", 24_000) / 4
        read = calls * (2 * shown + FRAME) + (calls - self.count) * FILE
        return Took(calls, read, read, calls * FILE)

    def _elsewhere(self, settings: dict[str, Any]) -> bool:
        """Whether a model is another one than the agent's, or behind another endpoint."""
        endpoint = settings.get("endpoint", self.spec.machine.asking.endpoint)
        return (settings.get("name"), endpoint) != (self.policy.get("name"), self.policy.get("endpoint"))

    def _price(self, took: Took) -> float | None:
        asking = self.spec.machine.asking
        if asking.input_price is None or asking.output_price is None:
            return None
        return (took.read * asking.input_price + took.written * asking.output_price) / 1e6

    def parts(self, training: bool) -> dict[str, float]:
        """GiB of one GPU by what holds them; {} where the model's size or its dialogues are not known."""
        size, gpus, longest = self.size, self.node.gpus, self.episode.longest
        if size is None or not self.served or not longest:
            return {}
        cache = 4 * size.layers * size.kv_heads * size.head * longest * self.spec.machine.batch
        parts = {
            "weights": (2 if training else 1) * 2 * size.parameters / gpus,
            "KV cache": cache / min(gpus, size.kv_heads),
        }
        if training:
            sequence = 2 * size.layers * size.hidden + 34 * size.hidden + 8 * size.vocabulary
            parts["LoRA and its optimizer"] = 16 * size.lora(self.trainer.get("rank", 16))
            parts["activations and logits"] = longest * sequence
        return {name: value / 2**30 for name, value in parts.items()}

    def memory(self, training: bool) -> float | None:
        """GiB of one GPU."""
        return sum(self.parts(training).values()) or None

    def assumptions(self) -> list[tuple[str, str, str]]:
        """All that the estimate rests on."""
        spec, one = self.spec, self.episode
        found = [
            ("capabilities selected", str(self.count), "spec: capabilities.count, at most"),
            ("attempts at an environment", f"1 to {spec.environments.rounds}", "spec: environments.rounds"),
            ("a rollout: calls, read (new), written", str(one.agent), one.source),
            ("errors, and answers refused", "none", "assumed"),
        ]
        if self.local:
            rate = RATES[self.policy["precision"], self.batch]
            found += [
                ("rollouts a CPU second", f"{rate:g}", "measured here: make bench, in README.md"),
                ("in training", f"{TRAINED:g}", "measured here: one adapter of `default`"),
                ("demonstrations a CPU second", f"{DEMONSTRATIONS:g}", "measured here: the base of `default`"),
                ("processes", str(spec.machine.workers), "spec: machine.workers"),
                ("imports, passports, statistics", "not counted: seconds a stage", "assumed"),
            ]
        if one.user.calls:
            found.append(("its simulated user, the same", str(one.user), one.source))
        if self.served:
            found += self._serving()
        if spec.analyst.target == ANALYST or spec.synthesizer.target == SYNTHESIZER:
            said = f"{FRAME:,} and 1 for 4 characters; {LABEL} a label of {POOL}; {FILE:,} a file"
            found.append(("tokens of questions and answers", said, "assumed"))
        return found

    def _serving(self) -> list[tuple[str, str, str]]:
        node, size, machine = self.node, self.size, self.spec.machine
        given = "stated: --throughput" if node.throughput else "assumed for 3.3 active, in proportion; --throughput"
        known = f"{size.parameters / 1e9:.3g}, {size.active / 1e9:.2g} of them active" if size else "not known"
        source = "stated: --parameters; dense, 128 times as wide as deep" if node.parameters else "published"
        trained = "q, k, v, o" + (" and feed-forward" if size and size.inner else ": experts are fused")
        return [
            ("in a synthesized environment", "the same, its user a script", "assumed"),
            ("longest dialogue", f"{self.episode.longest:,} tokens", self.episode.source),
            (f"{self.model}: billions", known, source if size else "--parameters states it"),
            ("LoRA", f"rank {self.trainer.get('rank', 16)} on {trained}", "spec: trainer.rank; assumed"),
            ("copies of its weights in training", "2, sharded: to sample and to train", "assumed"),
            ("GPUs", f"{node.gpus} of {node.memory:g} GiB, {USABLE:.0%} usable", "assumed; --gpus, --gpu-memory"),
            ("tokens a second of a GPU", f"{self.prefill:,.0f} read, {self.decode:,.0f} written", given),
            ("tokens a second of a request", f"{STREAM:g}", "assumed"),
            ("reading a dialogue", "each token once: prefixes are cached", "assumed"),
            ("training on a token", "4 times reading it", "assumed: recomputed, twice backward"),
            ("episodes at once", f"{machine.batch} a job", "spec: machine.batch"),
            ("jobs at once", f"{machine.workers} of adapters and evaluation", "spec: machine.workers"),
            ("worker of the benchmark", f"{self.episode.host:g} s a rollout", "measured here"),
            ("its processes", str(self.processes), "spec: machine.benchmarks"),
        ]

    def warnings(self, money: float | None) -> list[str]:
        """What to know that does not make the settings impossible."""
        spec, found = self.spec, []
        if self.episode == Episode():
            found.append(
                f"nothing is known of rollouts by {spec.policy.target} in {spec.benchmark.target}: counts only"
            )
        if self.served and self.size is None:
            found.append(f"the size of {self.model} is not known: state it with --parameters, in billions")
        if money is None:
            found.append("machine.asking.input_price and output_price, for a million tokens, show the money")
        if not self.local:
            found.append("this version trains and routes with policy=local alone: it stops after `environments`")
        if self.served and spec.benchmark.settings().get("user", "") is None:
            found.append("benchmark.user is null: a script plays the user, for checks and not for results")
        return found


def _total(stages: Sequence[Work]) -> Work:
    def added(values: list[float | None]) -> float | None:
        return None if None in values else sum(value for value in values if value is not None)

    took = Took()
    for one in stages:
        took = took.plus(one.took)
    return Work(
        "total", sum(one.jobs for one in stages), sum(one.rollouts for one in stages), took,
        max(one.gpus for one in stages), max([one.memory for one in stages if one.memory], default=None),
        added([one.seconds for one in stages]), added([one.money for one in stages]),
    )  # fmt: skip


def _temperature(spec: Spec) -> list[UserError]:
    if spec.exploring().settings().get("temperature") != 0:
        return []
    problem = "policy.temperature = 0 in training, too: every group of rollouts is constant there and teaches nothing"
    return [UserError(problem, "set environments.temperature=1.0")]


def _tasks(spec: Spec, total: float) -> list[UserError]:
    """More tasks than there are, of the benchmark's splits or of an environment."""
    there, size, found = splits(spec.benchmark), spec.trainer.group_size, []
    wanted = {"rollouts.tasks": ("discovery", spec.rollouts.tasks), "evaluation.tasks": ("test", spec.evaluation.tasks)}
    for key, (split, count) in wanted.items():
        if count > (most := there.get(split, count)):
            found.append(UserError(f"{key} = {count}, and split {split} has {most} tasks at most", f"set {key}={most}"))
    if "training" in there and total > (most := there["training"] * size):
        found.append(
            UserError(
                f"baselines: GRPO on the target spends what TRACE spends, at least {total:,.0f} rollouts, in groups of "
                f"{size} on {total / size:,.0f} tasks, and split training has {there['training']} tasks at most",
                f"bring TRACE's side down to {most:,} rollouts (adapters.rollouts, capabilities.count, and so on), "
                "or end with `dvc repro adapters` and without this baseline: this version trains on no task twice",
            )
        )
    needed, seeds = spec.environments.groups + spec.adapters.rollouts // size, spec.environments.seeds
    if needed > seeds:
        found.append(
            UserError(
                f"adapters.rollouts = {spec.adapters.rollouts} in groups of {size} and environments.groups = "
                f"{spec.environments.groups} need {needed} tasks of an environment, and its passport is for "
                f"environments.seeds = {seeds}",
                f"set environments.seeds={needed}, or lower adapters.rollouts",
            )
        )
    return found


def _memory(estimate: Estimate) -> list[UserError]:
    parts, node = estimate.parts(training=True), estimate.node
    needed, usable = sum(parts.values()), USABLE * node.memory
    if needed <= usable:
        return []
    shares = ", ".join(f"{name} {_rounded(value)}" for name, value in parts.items())
    problem = (
        f"{estimate.model} does not fit while it is trained: about {needed:.0f} GiB of each of {node.gpus} GPUs "
        f"({shares}), and {usable:.0f} of {node.memory:g} can be used"
    )
    return [UserError(problem, "plan with more --gpus or --gpu-memory, a smaller model, or a smaller machine.batch")]


def shown(made: Plan) -> list[RenderableType]:
    """The plan as something rich can print: counts, cost, what they rest on, what to know."""
    counts = _table(f"plan: {made.title}", "stage", "jobs", "rollouts", "model calls", "tokens read", "tokens written")
    cost = _table("cost", "stage", "GPUs", "GiB of each", "GPU-hours", "wall", "money")
    for low, high in zip(made.low, made.high, strict=True):
        style = "bold" if low.stage == "total" else ""
        pairs = ((getattr(low.took, name), getattr(high.took, name)) for name in ("calls", "read", "written"))
        rollouts = _range(low.rollouts, high.rollouts, lambda count: f"{count:,.0f}")
        counts.add_row(low.stage, str(low.jobs), rollouts, *(_range(*pair, _rounded) for pair in pairs), style=style)
        memory = _range(low.memory, high.memory, lambda size: f"{size:.0f}")
        gpus = (str(low.gpus), memory, _range(low.gpu_hours, high.gpu_hours, _rounded)) if low.gpus else ("", "", "")
        money = _range(low.money, high.money, _rounded)
        cost.add_row(low.stage, *gpus, _range(low.seconds, high.seconds, _time), money, style=style)
    counts.caption = "ranges: one attempt at each environment to all of them"
    rests = _table("what this rests on", "what", "value", "from", left=3)
    for row in made.assumptions:
        rests.add_row(*row)
    return [counts, cost, rests, *(Text(f"to know: {warning}", "yellow") for warning in made.warnings)]


def _table(title: str, *names: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for at, name in enumerate(names):
        table.add_column(name, justify="left" if at < left else "right")
    return table


def _range(low: float | None, high: float | None, said: Callable[[float], str]) -> str:
    if low is None or high is None:
        return "not known"
    ends = [said(value) if value else "" for value in (low, high)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _rounded(value: float) -> str:
    """Two digits: an estimate has no more."""
    value = float(f"{value:.2g}")
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= max(unit, 1e4):
            return f"{value / unit:g} {name}"
    return f"{value:,g}"


def _time(seconds: float) -> str:
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{_rounded(seconds / unit)} {name}"
    return f"{_rounded(seconds)} s"
