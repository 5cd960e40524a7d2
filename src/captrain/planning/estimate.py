"""The arithmetic of a plan: what each stage takes, from the settings and from what is assumed.

diagnosis    rollouts.tasks x rollouts.trials
calibration  capabilities x attempts x environments.groups x environments.group_size
training     capabilities x adapters.rollouts
TRACE        these three together, and so many: grpo_target, gepa, awm; mixed and ramp without diagnosis and
             calibration, single without diagnosis and one capability's calibration
controls     calibration and training of each capability that only they take
evaluation   (base + capabilities + each other arm) x evaluation.tasks x evaluation.trials; compositions on the
             tasks that are routed to them
tokens       rollouts x those of one; questions x those of one
wall         embedded base: rollouts / (rollouts a CPU second x workers); served model: the longest of
               computing  (new / prefill + written / decode) / GPUs of servers + 4 x trained / prefill / GPUs of
                          training, where a token of a dialogue is new once, and trained on in each epoch
               waiting    rollouts / episodes at once x tokens written in one / tokens a second of one request
               host       rollouts x seconds of the benchmark's worker / its processes
             policy=vllm: and in each job the start of its servers; as many jobs at once as there are GPUs for
GPU-hours    GPUs x wall: they are held while episodes wait
memory       copies x 2 bytes x parameters / GPUs                                       weights, bfloat16
of a GPU     + 4 bytes x layers x KV heads x head x longest x episodes / min(GPUs, KV heads)        KV cache
             and in training, where there are 2 copies, the sampler's and the trainer's, in place of 1
             + 16 bytes x LoRA parameters                                 with gradients and AdamW, float32
             + longest x (2 x layers x hidden + 34 x hidden + 8 x vocabulary) bytes      one sequence: checkpointed
                                                                          activations, one layer's own, logits
             policy=vllm: the servers' GPUs and the trainer's one are others; the larger of the two
money        (read x input_price + written x output_price) / 1e6, for what is not the agent's own model
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from captrain.config import Adp, Component, References, Spec, nested
from captrain.errors import UserError
from captrain.planning.assumptions import (
    ACTIVE,
    ANALYST,
    COMPOSED,
    CONTROLS,
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
    REFLECTED,
    SERVED,
    SIZES,
    START,
    STREAM,
    SYNTHESIZER,
    TRAINED,
    VLLM,
    Episode,
    Took,
    size_of,
)
from captrain.rollouts import SHARDS

TRACE = ("rollouts", "environments", "adapters")


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
    parts: tuple["Work", ...] = ()
    """Of a total."""

    @property
    def gpu_hours(self) -> float | None:
        """Of the GPUs that are held."""
        if self.parts:
            return _added([one.gpu_hours for one in self.parts])
        return None if self.seconds is None else self.gpus * self.seconds / 3600


class Estimate:
    """A configuration on a node, with so many attempts at each environment (their mean need not be whole), and with
    this share of all that controls may train and routers may compose."""

    def __init__(self, spec: Spec, node: Node, attempts: float, share: float = 0.0) -> None:
        self.spec, self.node, self.attempts, self.count = spec, node, attempts, spec.capabilities.count
        self.local, self.vllm = spec.policy.target == LOCAL, spec.policy.target == VLLM
        self.served = self.vllm or spec.policy.target == SERVED
        self.policy, self.trainer = spec.policy.settings(), spec.trainer.settings()
        self.user = nested("benchmark.user", spec.benchmark.settings().get("user"))
        self.episode = EPISODES.get((spec.benchmark.target, SERVED if self.served else spec.policy.target), Episode())
        if self.user is None or self.user.target != SERVED:
            self.episode = self.episode._replace(user=Took())
        self.model = str(spec.base.model if self.vllm else self.policy.get("name")).partition("@")[0]
        self.size = size_of(node.parameters * 1e9) if node.parameters else SIZES.get(self.model)
        scale = ACTIVE / self.size.active if self.size else 1
        self.prefill, self.decode = node.throughput or (PREFILL * scale, DECODE * scale)
        self.timed = node.throughput is not None or self.size is not None
        installed = spec.machine.benchmarks.get(spec.benchmark.target.split(".")[-2])
        self.processes = installed.processes if installed else 1
        self.batch = 256 if spec.machine.batch >= 256 else 64
        self.shards = SHARDS if spec.machine.launcher == "slurm" else 1
        self.diagnosis = spec.rollouts.tasks * spec.rollouts.trials
        one = attempts * spec.environments.groups * spec.environments.group_size
        self.calibration, self.training = self.count * one, self.count * spec.adapters.rollouts
        self.trace = self.diagnosis + self.calibration + self.training
        self.further = share * CONTROLS * self.count if spec.controls.run else 0
        self.controls = self.further * (one + spec.adapters.rollouts)
        self.composed = share * COMPOSED if self.count > 1 else 0

    def works(self) -> list[Work]:
        """The stages that cost anything, and their total."""
        spec, run, merging = self.spec, self.spec.baselines, self.spec.merging.methods
        single = self.trace - self.diagnosis - self.calibration / self.count
        stages = [
            Work("base", 1, seconds=spec.base.steps * spec.base.batch / DEMONSTRATIONS),
            self._played("rollouts", self.diagnosis, self.shards, user=True),
            self._asked(Work("labels", 1), spec.analyst, self._labelling(), spec.machine.asking.concurrency),
            self._asked(
                self._played("environments", self.calibration, self.count * self.shards), spec.synthesizer,
                self._writing(self.count),
            ),
            self._asked(Work("pairs", 1), spec.synthesizer, self._writing(spec.pairs.count)),
            self._played("adapters", self.training, self.count, spec.machine.workers, training=True),
            self._played("grpo_target", run.grpo_target.run * self.trace, user=True, training=True),
            self._reflected(self._played("gepa", run.gepa.run * self.trace, user=True)),
            self._taught("adp", run.adp),
            self._played("awm", run.awm.run * self.trace, training=True),
            self._played("single", run.single.run * single, training=True),
            self._played("mixed", run.mixed.run * self.training, training=True),
            self._played("ramp", run.ramp.run * self.training, user=True, training=True),
            self._taught("references", run.references),
            self._played("merging", ("distillation" in merging) * spec.merging.rollouts, training=True),
            self._played(
                "controls", self.controls, max(1, math.ceil(self.further)), spec.machine.workers, training=True
            ),
            self._evaluated(),
        ]  # fmt: skip
        costing = [one for one in stages if one.rollouts or one.took.calls or one.took.new]
        first = [] if spec.base.model else stages[:1]
        return [*first, *costing, total([*first, *costing])]

    def _evaluated(self) -> Work:
        """All arms on the test split; a composition on the tasks that are routed to it."""
        spec = self.spec
        others = sum(getattr(spec.baselines, name).run for name in type(spec.baselines).model_fields)
        arms = 1 + self.count + others + len(spec.merging.methods) + self.further
        tests = spec.evaluation.tasks * spec.evaluation.trials
        return self._played(
            "evaluation", (arms + self.composed) * tests, math.ceil(arms), spec.machine.workers, user=True
        )

    def _taught(self, stage: str, asked: Adp | References) -> Work:
        """Fine-tuning on demonstrations, of which each is taken to be as long as a rollout."""
        read = asked.run * asked.demonstrations * (self.episode.agent.new + self.episode.agent.written)
        work = Work(stage, 1, took=Took(new=read))
        if not read or self.episode == Episode():
            return work
        seconds = asked.demonstrations * asked.epochs / DEMONSTRATIONS
        if self.served:
            seconds = 4 * read * asked.epochs / self.prefill if self.timed else None
        gpus = 1 if self.served else 0
        return replace(work, gpus=gpus, memory=self.memory(True) if gpus else 0, seconds=seconds)

    def _reflected(self, work: Work) -> Work:
        """A search with its questions added: one for each minibatch of parent and child, at the most."""
        gepa, one = self.spec.baselines.gepa, self.episode.agent
        if gepa.model is None or not work.rollouts:
            return work
        calls = work.rollouts / (2 * gepa.minibatch)
        read = calls * (gepa.minibatch * (one.new + one.written) + REFLECTED)
        model = Component.model_validate({"_target_": ANALYST, "name": gepa.model})
        return self._asked(work, model, Took(calls, read, read, calls * LABEL))

    def servers(self, training: bool) -> int:
        """GPUs of the servers that one job samples through; the trainer has one more, of its own."""
        if not self.vllm:
            return self.node.gpus
        own = self.spec.machine.slurm if self.spec.machine.launcher == "slurm" else None
        stated = self.spec.machine.vllm.replicas * self.spec.machine.vllm.gpus
        return stated or max(1, (own.gpus if own else self.node.gpus) - training)

    def _played(
        self, stage: str, rollouts: float, jobs: int = 1, workers: int = 1, *, user: bool = False,
        training: bool = False,
    ) -> Work:  # fmt: skip
        """A stage that plays; `user`: in the benchmark itself, with its worker and its simulated user."""
        spec, servers = self.spec, self.servers(training)
        one = self.episode if user else self.episode._replace(user=Took(), host=0)
        held = servers + (training and self.vllm)
        parallel = min(jobs, workers)
        if self.vllm:
            parallel = min(jobs, max(1, self.node.gpus // held)) if spec.machine.launcher == "slurm" else 1
        work = Work(stage, jobs, rollouts, one.agent.plus(one.user).times(rollouts))
        if self.episode == Episode() or not (self.local or self.served):
            return replace(work, seconds=None)
        if self.local:
            rate = TRAINED if training else RATES[self.policy["precision"], self.batch]
            return replace(work, seconds=rollouts / rate * math.ceil(jobs / parallel) / jobs)
        bought = user and self.user is not None and self._elsewhere(self.user.settings())
        here = one.agent if bought else one.agent.plus(one.user)
        trained = one.agent.new * self.trainer.get("epochs", 1) if training else 0
        # All that a job holds is its own; without jobs, one model has all GPUs, to sample and to train.
        at_once = parallel if self.vllm else 1
        computing = rollouts * (here.new / self.prefill + here.written / self.decode) / (servers * at_once)
        computing += rollouts * 4 * trained / self.prefill / (at_once if self.vllm else servers)
        turns = max(1, rollouts / (spec.machine.batch * parallel))
        waiting = turns * (one.agent.written + one.user.written) / STREAM
        seconds = max(computing, waiting, rollouts * one.host / self.processes)
        if self.vllm:
            seconds += START * math.ceil(jobs / parallel)
        return replace(
            work, gpus=held * at_once, memory=self.memory(training), seconds=seconds if self.timed else None,
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

    def _writing(self, count: int) -> Took:
        """All questions of a synthesizer for so many environments; every one but the first shows the file before."""
        if self.spec.synthesizer.target != SYNTHESIZER:
            return Took()
        calls, shown = count * self.attempts, self.spec.synthesizer.settings().get("characters", 24_000) / 4
        read = calls * (2 * shown + FRAME) + (calls - count) * FILE
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
        """GiB of one GPU by what holds them; {} where the model's size or its dialogues are not known. policy=vllm: of
        the trainer's one GPU or of a server's, whichever holds more."""
        size, longest, vllm = self.size, self.episode.longest, self.spec.machine.vllm
        if size is None or not self.served or not longest:
            return {}
        gpus = (vllm.gpus or self.servers(training)) if self.vllm else self.node.gpus
        episodes = math.ceil(self.spec.machine.batch / (vllm.replicas if self.vllm else 1))
        cache = 4 * size.layers * size.kv_heads * size.head * longest * episodes
        lora = size.lora(self.trainer.get("rank", 16))
        sequence = 2 * size.layers * size.hidden + 34 * size.hidden + 8 * size.vocabulary
        learning = {"LoRA and its optimizer": 16 * lora, "activations and logits": longest * sequence}
        copies = 2 if training and not self.vllm else 1
        parts: dict[str, float] = {
            "weights": copies * 2 * size.parameters / gpus,
            "KV cache": cache / min(gpus, size.kv_heads),
        }
        if self.vllm:
            parts["LoRA"] = 2 * lora
            trainer = {"weights": 2 * size.parameters, **learning}
            if training and sum(trainer.values()) > sum(parts.values()):
                parts = trainer
        elif training:
            parts |= learning
        return {name: value / 2**30 for name, value in parts.items()}

    def memory(self, training: bool) -> float | None:
        """GiB of one GPU."""
        return sum(self.parts(training).values()) or None


def total(stages: Sequence[Work]) -> Work:
    """All stages together."""

    took = Took()
    for one in stages:
        took = took.plus(one.took)
    return Work(
        "total", sum(one.jobs for one in stages), sum(one.rollouts for one in stages), took,
        max(one.gpus for one in stages), max([one.memory for one in stages if one.memory], default=None),
        _added([one.seconds for one in stages]), _added([one.money for one in stages]), tuple(stages),
    )  # fmt: skip


def _added(values: Sequence[float | None]) -> float | None:
    return None if None in values else sum(value for value in values if value is not None)
