"""The arithmetic of a plan: what each stage costs, from the settings and the assumptions.

rollouts
    diagnosis    rollouts.tasks x rollouts.trials
    calibration  capabilities x attempts x environments.groups x environments.group_size
    training     capabilities x adapters.rollouts
    TRACE        the sum of these three. grpo_target, gepa and awm spend the same; mixed spends it without diagnosis and
                 calibration, single without diagnosis and one capability's calibration
    controls     calibration and training of each capability that only they take
    evaluation   (base + capabilities + each other arm) x evaluation.tasks x evaluation.trials. Compositions play the
                 tasks that are routed to them. Curves add 2 x (curve.points - 1) arms
    causality    questions only: at most evaluation.tasks x evaluation.trials

tokens
    rollouts x tokens of one rollout; questions x tokens of one question

wall time
    embedded base: rollouts / (rollouts a CPU second x workers)
    served model: the longest of
        computing  (new / prefill + written / decode) / server GPUs + 3.5 x trained / prefill / training GPUs. A token
                   of a dialogue is new once and is trained on in each epoch
        waiting    rollouts / episodes at once x tokens written in one / tokens a second of one request
        host       rollouts x seconds of the benchmark's worker / its processes
    policy=vllm adds the start of the servers, once a stage, on Slurm once a job. As many jobs run at once as the GPUs
    allow.

GPU-hours
    GPUs x wall time: GPUs are held while episodes wait

memory of one GPU
    copies x 2 bytes x parameters / GPUs                                   weights, bfloat16
    + 4 bytes x layers x KV heads x head x longest x episodes / min(GPUs, KV heads)    KV cache
    Training adds a second copy of the weights (the trainer's beside the sampler's) and
    + 16 bytes x LoRA parameters                                           with gradients and AdamW, float32
    + longest x activations                                                one sequence (`ModelSize.activations`)
    With policy=vllm servers and trainer have GPUs of their own, and machine.accelerate decides what a training GPU
    holds: weights in its precision, divided by FSDP among its processes, with two layers whole; LoRA, divided alike;
    `rows` sequences, or a process's share of a step.

money
    (read x input_price + written x output_price) / 1e6 for models other than the agent's; the agent's own tokens cost
    what --price states
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from captrain.agents import SHARDS
from captrain.comparison import Baseline, baselines
from captrain.errors import UserError
from captrain.planning.assumptions import (
    ANALYST,
    CANDIDATES,
    COMPOSED_COLUMNS,
    CONTROL_CHOICES,
    ENDPOINT_THROUGHPUT,
    EPISODE_COSTS,
    FILE_TOKENS,
    FRAME_TOKENS,
    LABEL_TOKENS,
    LOCAL,
    PASSPORT,
    REFLECTION_TOKENS,
    REQUEST_RATE,
    ROUTING,
    SERVED,
    SERVER_START,
    SHARED_TRAINING,
    SIZES,
    SYNTHESIZER,
    TRAINING_FACTOR,
    VLLM,
    VLLM_THROUGHPUT,
    Assumption,
    EpisodeCost,
    ModelUse,
    dense_size,
    local_rates,
    split_sizes,
)
from captrain.run import Component, Spec, nested

UNTRAINED = ("base", "rollouts", "labels", "environments", "pairs")
"""Stages that need no adapter. With a hosted endpoint, whose model cannot be trained, only these stages run."""


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage, or the sum of `parts`. Wall seconds, GiB of one GPU and money are None if unknown."""

    stage: str
    jobs: int = 0
    rollouts: float = 0
    use: ModelUse = ModelUse()
    gpus: int = 0
    memory: float | None = 0
    seconds: float | None = 0
    money: float | None = 0
    parts: tuple["StageCost", ...] = ()

    @property
    def gpu_hours(self) -> float | None:
        """GPUs x hours; None if unknown."""
        if self.parts:
            return sum_if_known([part.gpu_hours for part in self.parts])
        return None if self.seconds is None else self.gpus * self.seconds / 3600


def sum_if_known(values: Sequence[float | None]) -> float | None:
    """Return the sum of the values; None if any value is None."""
    return None if None in values else sum(value for value in values if value is not None)


def _summed(name: str, costs: Sequence[StageCost]) -> StageCost:
    """Add up costs of stages that run one after another."""
    return StageCost(
        name,
        jobs=sum(cost.jobs for cost in costs),
        rollouts=sum(cost.rollouts for cost in costs),
        use=ModelUse(*map(sum, zip(*(cost.use for cost in costs), strict=True))),
        gpus=max(cost.gpus for cost in costs),
        memory=max([cost.memory for cost in costs if cost.memory], default=None),
        seconds=sum_if_known([cost.seconds for cost in costs]),
        money=sum_if_known([cost.money for cost in costs]),
        parts=tuple(costs),
    )


@dataclass(frozen=True)
class Node:
    """The GPUs to plan with, and what the user states about the model.

    gpus: number of GPUs. memory: GiB of each GPU. throughput: tokens per second of one GPU, read and written.
    parameters: billions of parameters, for a model of unknown size. price: price of a million tokens at the agent's
    endpoint, read and written. speed: speed of a CPU core relative to the reference machine (see `machine_speed`).
    """

    gpus: int = 8
    memory: float = 80.0
    throughput: tuple[float, float] | None = None
    parameters: float | None = None
    price: tuple[float, float] | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        parameters = 1 if self.parameters is None else self.parameters
        options = {"--gpus": [self.gpus], "--gpu-memory": [self.memory], "--parameters": [parameters]}
        for name, values in {**options, "--throughput": self.throughput or [1]}.items():
            if not all(0 < value < math.inf for value in values):
                given = " ".join(map(str, values))
                raise UserError(f"{name} must be a positive number, got {given}", f"give {name} a number above 0")


class RunEstimate:
    """Estimate of a configuration on a node.

    Args:
        spec: the configuration.
        node: the GPUs.
        attempts: mean number of attempts at each environment.
        share: share of the capabilities that controls may train and of the tasks that routers may compose for, in
            [0, 1].
    """

    def __init__(self, spec: Spec, node: Node, attempts: float, share: float = 0.0) -> None:
        machine, evaluation = spec.machine, spec.evaluation
        self.spec, self.node, self.attempts, self.count = spec, node, attempts, spec.capabilities.count
        # The agent's model: where it acts, how large and how fast it is.
        self.local, self.vllm = spec.policy.target == LOCAL, spec.policy.target == VLLM
        self.served = self.vllm or spec.policy.target == SERVED
        self.trainable = self.local or self.vllm
        self.policy, self.trainer = spec.policy.settings(), spec.trainer.settings()
        self.rates = local_rates(spec, node.speed)
        self.rank, self.experts = self.trainer.get("rank", 16), bool(self.trainer.get("experts", False))
        self.model = str((spec.base.model if self.vllm else self.policy.get("name")) or "the base").partition("@")[0]
        self.size = dense_size(node.parameters * 1e9) if node.parameters else SIZES.get(self.model)
        throughput = VLLM_THROUGHPUT if self.vllm else ENDPOINT_THROUGHPUT
        if node.throughput:
            prefill, decode = node.throughput
            throughput = throughput._replace(prefill=prefill, decode=decode, source="stated: --throughput")
        elif self.size:
            scale = throughput.active / self.size.active
            throughput = throughput._replace(prefill=throughput.prefill * scale, decode=throughput.decode * scale)
        self.throughput, self.timed = throughput, node.throughput is not None or self.size is not None
        shared = SHARED_TRAINING.value if machine.workers > 1 else 1
        self.demonstration_rate = shared * self.rates.demonstrations.value
        # One rollout, and the model of its simulated user.
        self.user = nested("benchmark.user", spec.benchmark.settings().get("user"))
        policy_kind = SERVED if self.served else spec.policy.target
        self.episode = EPISODE_COSTS.get((spec.benchmark.target, policy_kind), EpisodeCost())
        if self.user is None or self.user.target != SERVED:
            self.episode = self.episode._replace(user=ModelUse())
        installed = machine.benchmarks.get(spec.benchmark.target.split(".")[-2])
        self.processes = installed.processes if installed else 1
        # On Slurm each job has its own servers and GPUs; elsewhere trainings run one after another.
        self.on_slurm = machine.launcher == "slurm"
        self.shards = SHARDS if self.on_slurm else 1
        # Rollouts.
        self.diagnosis = spec.rollouts.tasks * spec.rollouts.trials
        calibration = attempts * spec.environments.groups * spec.environments.group_size
        self.calibration, self.training = self.count * calibration, self.count * spec.adapters.rollouts
        self.trace = self.diagnosis + self.calibration + self.training
        self.further = share * CONTROL_CHOICES.value * self.count if spec.controls.run else 0
        self.controls = self.further * (calibration + spec.adapters.rollouts)
        columns = COMPOSED_COLUMNS.value if evaluation.alternatives else 1
        self.composed = share * columns if self.count > 1 else 0

    def costs(self) -> list[StageCost]:
        """Estimate the stages that cost anything, and last their total."""
        spec, workers = self.spec, self.spec.machine.workers
        # Questions label every rollout of the diagnosis in every run, and at most every test rollout of the base.
        labelling = self._labelling(spec.labels.runs * self.diagnosis, CANDIDATES, spec.labels.runs)
        tests = spec.evaluation.tasks * spec.evaluation.trials
        causal = tests if spec.causality.run and spec.evaluation.trials > 1 else 0
        concurrency, distilled = spec.machine.asking.concurrency, "distillation" in spec.merging.methods
        calibration = self._playing("environments", self.calibration, self.count * self.shards)
        stages = [
            StageCost("base", 1, seconds=spec.base.steps * spec.base.batch / self.demonstration_rate),
            self._playing("rollouts", self.diagnosis, self.shards, user=True),
            self._asking(StageCost("labels", 1), spec.analyst, labelling, concurrency),
            self._asking(self._examined(calibration, self.count), spec.synthesizer, self._synthesis(self.count)),
            self._asking(
                self._examined(StageCost("pairs", 1), spec.pairs.count),
                spec.synthesizer,
                self._synthesis(spec.pairs.count),
            ),
            self._playing("adapters", self.training, self.count, workers, training=True),
            *(self._baseline(row) for row in baselines().values()),
            self._playing("merging", distilled * spec.merging.rollouts, training=True),
            self._playing("controls", self.controls, max(1, math.ceil(self.further)), workers, training=True),
            StageCost("routes", 1, seconds=ROUTING.value / self.node.speed if self.local and self.count else 0),
            _summed("evaluation", self.evaluation_costs()),
            self._asking(StageCost("causality", 1), spec.analyst, self._labelling(causal, self.count), concurrency),
        ]
        stages = [stage for stage in stages if self.trainable or stage.stage in UNTRAINED]
        stages = stages[1:] if spec.base.model else stages
        costing = [stage for stage in stages if any((stage.rollouts, *stage.use, self.local and stage.seconds))]
        return [*costing, _summed("total", costing)]

    def _examined(self, cost: StageCost, count: int) -> StageCost:
        """Add the examination of `count` environments to a stage of a local model."""
        if not self.local or cost.seconds is None:
            return cost
        return replace(cost, seconds=cost.seconds + count * PASSPORT.value / self.node.speed)

    def evaluation_costs(self) -> list[StageCost]:
        """Estimate the rows of the evaluation that play anything, each by its stage `evaluation@ROW`."""
        spec, evaluation, workers = self.spec, self.spec.evaluation, self.spec.machine.workers
        # Without alternatives the adapters of a kind share the tasks and count as one arm.
        count = self.count if evaluation.alternatives else min(1, self.count)
        points = max(0, spec.curve.points - 1)
        arms = {"base": 1, "trace": count + self.composed + points}
        arms |= {name: row.arms(spec, count) for name, row in baselines().items() if row.section(spec).run}
        arms |= {"merging": len(spec.merging.methods), "controls": self.further}
        if "grpo_target" in arms:
            arms["grpo_target"] += points
        further = split_sizes(spec.benchmark) if evaluation.splits == "all" else {}
        tasks = evaluation.tasks + further.get("discovery", 0) + further.get("training", 0)
        parts = self.shards if self.on_slurm else workers
        return [
            self._playing(
                f"evaluation@{row}",
                number * tasks * evaluation.trials,
                max(math.ceil(number), parts),
                workers,
                user=True,
            )
            for row, number in arms.items()
            if number
        ]

    def baseline_rollouts(self, row: Baseline) -> float:
        """Estimate the rollouts that a row's stage plays."""
        if not row.section(self.spec).run:
            return 0
        rollouts = row.planned_rollouts(self.diagnosis, self.calibration, self.training, self.count)
        starts = [baselines()[stage] for stage in row.rests_on if stage in baselines()]
        return max(0, rollouts - sum(start.diagnosing_rollouts(self.spec, self.attempts) for start in starts))

    def _baseline(self, row: Baseline) -> StageCost:
        """Estimate a row's stage: its rollouts, and the learning from them or from demonstrations."""
        rollouts, on_target, agent = self.baseline_rollouts(row), row.target_share(self.spec) > 0, self.episode.agent
        if row.learns_from == "demonstrations":
            rollouts, on_target = row.diagnosing_rollouts(self.spec, self.attempts), True
        cost = self._playing(row.name, rollouts, user=on_target, training=row.trains_by_grpo)
        if row.learns_from == "reflection":
            # At most one question for each minibatch of parent and child.
            gepa = self.spec.baselines.gepa
            calls = cost.rollouts / (2 * gepa.minibatch) if gepa.model else 0
            tokens = calls * (gepa.minibatch * (agent.new_input + agent.output) + REFLECTION_TOKENS.value)
            model = Component.model_validate({"_target_": ANALYST, "name": gepa.model})
            return self._asking(cost, model, ModelUse(calls, tokens, tokens, calls * LABEL_TOKENS))
        if row.trains_by_grpo:
            return cost
        # Fine-tuning on demonstrations, each assumed to be as long as a rollout.
        demonstrations, epochs = row.demonstrations(self.spec)
        tokens = demonstrations * (agent.new_input + agent.output)
        tuned = replace(cost, use=cost.use.plus(ModelUse(new_input=tokens)))
        if not tokens or self.episode == EpisodeCost():
            return tuned
        if not self.served:
            return replace(tuned, seconds=demonstrations * epochs / self.demonstration_rate + (cost.seconds or 0))
        gpus = self.trainers()
        seconds = TRAINING_FACTOR.value * tokens * epochs / self.throughput.prefill / gpus + (cost.seconds or 0)
        return replace(
            tuned, gpus=max(gpus, cost.gpus), memory=self.memory(True), seconds=seconds if self.timed else None
        )

    def trainers(self) -> int:
        """Count the GPUs of one training through servers: one for each of its processes."""
        return self.spec.machine.accelerate.processes * (1 if self.on_slurm else self.spec.machine.gpu_sets(1))

    def servers(self, training: bool) -> int:
        """Count the GPUs of the servers that one job samples through, without those of training and endpoint."""
        machine = self.spec.machine
        if not self.vllm:
            return self.node.gpus
        elsewhere = self.trainers() // machine.nodes * training + machine.asking.gpus
        gpus = machine.slurm.gpus if self.on_slurm and machine.slurm else self.node.gpus
        return machine.vllm.replicas * machine.vllm.gpus or max(1, gpus - elsewhere)

    def _playing(
        self,
        stage: str,
        rollouts: float,
        jobs: int = 1,
        workers: int = 1,
        *,
        user: bool = False,
        training: bool = False,
    ) -> StageCost:
        """Estimate a stage of rollouts; `user`: in the benchmark itself, with its worker and simulated user."""
        episode = self.episode if user else self.episode._replace(user=ModelUse(), host=Assumption(0, "no worker"))
        agent, throughput, servers = episode.agent, self.throughput, self.servers(training)
        cost = StageCost(stage, jobs, rollouts, agent.plus(episode.user).times(rollouts))
        if self.episode == EpisodeCost() or not (self.local or self.served):
            return replace(cost, seconds=None)
        if self.local:
            rate = self.rates.training if training else self.rates.rollouts
            return replace(cost, seconds=rollouts / rate.value * math.ceil(jobs / min(jobs, workers)) / jobs)
        # The number of parallel jobs, and the GPUs that they use together.
        training_gpus = self.trainers() if training and self.vllm else 0
        parallel, gpus = min(jobs, workers), servers + training_gpus
        if self.vllm and self.on_slurm:
            parallel = min(jobs, max(1, self.node.gpus // gpus))
            gpus *= parallel
        elif self.vllm:
            parallel = 1
        # Computing. captrain's own servers and the trainer have separate GPUs. Otherwise one model uses all GPUs.
        separate = user and self.user is not None and self._is_other_model(self.user.settings())
        use = agent if separate else agent.plus(episode.user)
        sampling = rollouts * (use.new_input / throughput.prefill + use.output / throughput.decode) / servers
        trained = agent.new_input * self.trainer.get("epochs", 1) if training else 0
        passes = TRAINING_FACTOR.value * trained / throughput.prefill
        combined = sampling + rollouts * passes / (self.trainers() if self.vllm else servers)
        computing = combined * math.ceil(jobs / parallel) / jobs if self.vllm else combined
        # Waiting for one request after another, and for the benchmark's worker.
        turns = max(1, rollouts / (self.spec.machine.batch * parallel))
        latency = turns * (agent.output + episode.user.output) / REQUEST_RATE.value
        seconds = max(computing, latency, rollouts * episode.host.value / self.processes)
        if self.vllm:
            seconds += SERVER_START.value * (math.ceil(jobs / parallel) if self.on_slurm else 1)
        # Money for the agent's tokens if its endpoint has a price, and for another model that plays the user.
        money = self._price(episode.user.times(rollouts)) if separate else 0.0
        if money is not None:
            input_price, output_price = self.node.price or (0.0, 0.0)
            money += rollouts * (use.input * input_price + use.output * output_price) / 1e6
        return replace(
            cost, gpus=gpus, memory=self.memory(training), seconds=seconds if self.timed else None, money=money
        )

    def _asking(self, cost: StageCost, component: Component, use: ModelUse, concurrency: int = 1) -> StageCost:
        """Add the questions of an analyst or synthesizer to a stage."""
        if not use.calls or component.target not in (ANALYST, SYNTHESIZER):
            return cost
        throughput = self.throughput
        separate = self._is_other_model(component.settings()) or self.spec.machine.asking.input_price is not None
        latency = use.output / REQUEST_RATE.value / min(concurrency, use.calls)
        computing = use.new_input / throughput.prefill + use.output / throughput.decode
        seconds = (cost.seconds or 0) + max(latency, 0 if separate else computing / self.node.gpus)
        return replace(
            cost,
            use=cost.use.plus(use),
            seconds=seconds if cost.seconds is not None and (separate or self.timed) else None,
            gpus=cost.gpus if separate else self.node.gpus,
            memory=cost.memory if separate else self.memory(False),
            money=self._price(use) if separate else 0,
        )

    def _labelling(self, labels: float, candidates: int, runs: int = 0) -> ModelUse:
        """Estimate the questions of an analyst: labels of candidates, one question in each of `runs` that proposes, and
        one that merges the proposals."""
        settings = self.spec.analyst.settings()
        dialogue = settings.get("characters", 16_000) / 4
        dialogues = settings.get("failed", 4) + settings.get("passed", 4)
        proposals = runs * settings.get("proposals", 8) * LABEL_TOKENS
        tokens = runs * (dialogues * dialogue + FRAME_TOKENS) + proposals + labels * (dialogue + FRAME_TOKENS)
        output = 2 * proposals + labels * candidates * LABEL_TOKENS
        return ModelUse(labels + (runs + 1 if runs else 0), tokens, tokens, output)

    def _synthesis(self, count: int) -> ModelUse:
        """Estimate all questions of a synthesizer for `count` environments; retries also show the previous file."""
        calls, dialogue = count * self.attempts, self.spec.synthesizer.settings().get("characters", 24_000) / 4
        tokens = calls * (2 * dialogue + FRAME_TOKENS) + (calls - count) * FILE_TOKENS
        return ModelUse(calls, tokens, tokens, calls * FILE_TOKENS)

    def _is_other_model(self, settings: Mapping[str, object]) -> bool:
        """Return whether a model differs from the agent's, or is behind another endpoint."""
        endpoint = settings.get("endpoint", self.spec.machine.asking.endpoint)
        return (settings.get("name"), endpoint) != (self.policy.get("name"), self.policy.get("endpoint"))

    def _price(self, use: ModelUse) -> float | None:
        """Price the tokens of models other than the agent's; None if no price is set."""
        prices = self.spec.machine.asking
        if prices.input_price is None or prices.output_price is None:
            return None
        return (use.input * prices.input_price + use.output * prices.output_price) / 1e6

    def memory_groups(self, training: bool) -> dict[str, dict[str, float]]:
        """Estimate the GiB of one GPU by group of GPUs (servers, trainer, or both on the same) and by what holds them.

        {} if the size of the model or the length of its dialogues is unknown.
        """
        size, longest, machine = self.size, self.episode.longest, self.spec.machine
        if size is None or not self.served or not longest:
            return {}
        vllm, accelerate, lora = machine.vllm, machine.accelerate, size.lora(self.rank, self.experts)
        # Sampling.
        gpus = (vllm.gpus or self.servers(training)) if self.vllm else self.node.gpus
        replicas = vllm.replicas if self.vllm else 1
        cache = 4 * size.layers * size.kv_heads * size.head * longest * math.ceil(machine.batch / replicas)
        copies = 2 if training and not self.vllm else 1
        serving = {"weights": copies * 2 * size.parameters / gpus, "KV cache": cache / min(gpus, size.kv_heads)}
        # Training, on the same GPUs or, with policy=vllm, on others.
        if not self.vllm:
            learning = {"LoRA and its optimizer": 16 * lora, "activations": longest * size.activations(True)}
            groups = {"GPUs": serving | (learning if training else {})}
        else:
            width = {"float64": 8, "float32": 4, "bfloat16": 2}[accelerate.precision]
            shards = accelerate.processes if accelerate.strategy == "fsdp" else 1
            step = self.spec.trainer.group_size * self.spec.trainer.groups_per_step
            rows = accelerate.rows or step // accelerate.processes
            learning = {
                "weights": width * size.parameters / shards,
                "LoRA and its optimizer": 16 * lora / shards,
                **({"two layers gathered": 2 * width * size.parameters / size.layers} if shards > 1 else {}),
                "activations": rows * longest * size.activations(accelerate.gradient_checkpointing) * width / 2,
                # Only distillation holds the whole distribution of each token.
                "logits": 5 * rows * longest * size.vocabulary * ("distillation" in self.spec.merging.methods),
            }
            groups = {"servers": serving | {"LoRA": 2 * lora}, **({"trainer": learning} if training else {})}
        return {group: {name: value / 2**30 for name, value in parts.items()} for group, parts in groups.items()}

    def memory(self, training: bool) -> float | None:
        """Estimate the GiB of one GPU in the group that holds most; None if unknown."""
        return max((sum(parts.values()) for parts in self.memory_groups(training).values()), default=None)
