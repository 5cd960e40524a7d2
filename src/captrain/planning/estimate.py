"""The arithmetic of a plan: what each stage takes, from the settings and from what is assumed.

diagnosis    rollouts.tasks x rollouts.trials
calibration  capabilities x attempts x environments.groups x environments.group_size
training     capabilities x adapters.rollouts
TRACE        these three together, and so many: grpo_target, gepa, awm; mixed without diagnosis
             and calibration, single without diagnosis and one capability's calibration
controls     calibration and training of each capability that only they take
evaluation   (base + capabilities + each other arm) x evaluation.tasks x evaluation.trials; compositions on the
             tasks that are routed to them; and 2 x (curve.points - 1) arms, TRACE's and GRPO's on the way
causality    questions alone: evaluation.tasks x evaluation.trials at the most
tokens       rollouts x those of one; questions x those of one
wall         embedded base: rollouts / (rollouts a CPU second x workers); served model: the longest of
               computing  (new / prefill + written / decode) / GPUs of servers + 4 x trained / prefill / GPUs of
                          training, where a token of a dialogue is new once, and trained on in each epoch;
                          of jobs at once over one fleet of servers at least the first part, and else one job's
                          share of both for each of them
               waiting    rollouts / episodes at once x tokens written in one / tokens a second of one request
               host       rollouts x seconds of the benchmark's worker / its processes
             policy=vllm: and the start of the servers, once a stage, on Slurm in each job; as many jobs at once
             as there are GPUs for
GPU-hours    GPUs x wall: they are held while episodes wait
memory       copies x 2 bytes x parameters / GPUs                                       weights, bfloat16
of a GPU     + 4 bytes x layers x KV heads x head x longest x episodes / min(GPUs, KV heads)        KV cache
             and in training, where there are 2 copies, the sampler's and the trainer's, in place of 1
             + 16 bytes x LoRA parameters                                 with gradients and AdamW, float32
             + longest x (2 x layers x hidden + 34 x hidden + 8 x vocabulary) bytes      one sequence: checkpointed
                                                                          activations, one layer's own, logits
             policy=vllm: the servers' GPUs and the trainer's are others, and machine.accelerate says what one of the
             trainer's holds: weights in its precision, by FSDP divided among its processes, with two layers whole;
             LoRA, divided alike; `rows` sequences, or a process's share of a step, without checkpoints 34 x hidden
             bytes of every layer
money        (read x input_price + written x output_price) / 1e6, for what is not the agent's own model; for that as
             --price has it
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from captrain.comparison import Baseline, baselines
from captrain.config import Component, Spec, nested
from captrain.errors import UserError
from captrain.planning.assumptions import (
    ANALYST,
    COMPOSED_COLUMNS,
    CONTROL_CHOICES,
    ENDPOINT_THROUGHPUT,
    EPISODE_COSTS,
    LOCAL,
    QUESTIONS,
    REFLECTION_TOKENS,
    REQUEST_RATE,
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
    ModelSize,
    ModelUse,
    Throughput,
    dense_size,
    local_rates,
    split_sizes,
)
from captrain.planning.cost import StageCost, total
from captrain.rollouts import SHARDS

UNTRAINED = ("base", "rollouts", "labels", "environments", "pairs")
"""Stages that need no adapter: all that run with an endpoint that somebody else runs, through which none is trained."""


@dataclass(frozen=True)
class Node:
    """The GPUs that are planned with: how many, GiB of each, and tokens a second of each, read and written; the
    parameters of the model in billions, where its size is not known; and the price of a million tokens at the agent's
    own endpoint, read and written, where it has one."""

    gpus: int = 8
    memory: float = 80.0
    throughput: tuple[float, float] | None = None
    parameters: float | None = None
    price: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        options = {"--gpus": [self.gpus], "--gpu-memory": [self.memory], "--throughput": self.throughput or [1]}
        for name, values in {**options, "--parameters": [1 if self.parameters is None else self.parameters]}.items():
            if not all(0 < value < math.inf for value in values):
                raise UserError(
                    f"{name} must be above 0 and finite, got {' '.join(map(str, values))}", f"give another {name}"
                )


class Estimate:
    """A configuration on a node, with so many attempts at each environment (their mean need not be whole), and with
    this share of all that controls may train and routers may compose."""

    def __init__(self, spec: Spec, node: Node, attempts: float, share: float = 0.0) -> None:
        self.spec, self.node, self.attempts, self.count = spec, node, attempts, spec.capabilities.count
        self.local, self.vllm = spec.policy.target == LOCAL, spec.policy.target == VLLM
        self.served = self.vllm or spec.policy.target == SERVED
        self.trainable = self.local or self.vllm
        self.policy, self.trainer = spec.policy.settings(), spec.trainer.settings()
        self.rank, self.rates = self.trainer.get("rank", 16), local_rates(spec)
        self.experts = bool(self.trainer.get("experts", False))
        self.user = nested("benchmark.user", spec.benchmark.settings().get("user"))
        policy_kind = SERVED if self.served else spec.policy.target
        self.episode = EPISODE_COSTS.get((spec.benchmark.target, policy_kind), EpisodeCost())
        if self.user is None or self.user.target != SERVED:
            self.episode = self.episode._replace(user=ModelUse())
        self.model = str(spec.base.model if self.vllm else self.policy.get("name")).partition("@")[0]
        self.size = dense_size(node.parameters * 1e9) if node.parameters else SIZES.get(self.model)
        self.throughput = self._throughput()
        self.timed = node.throughput is not None or self.size is not None
        installed = spec.machine.benchmarks.get(spec.benchmark.target.split(".")[-2])
        self.processes = installed.processes if installed else 1
        self.shards = SHARDS if spec.machine.launcher == "slurm" else 1
        self.diagnosis = spec.rollouts.tasks * spec.rollouts.trials
        calibration = attempts * spec.environments.groups * spec.environments.group_size
        self.calibration, self.training = self.count * calibration, self.count * spec.adapters.rollouts
        self.trace = self.diagnosis + self.calibration + self.training
        self.further = share * CONTROL_CHOICES.value * self.count if spec.controls.run else 0
        self.controls = self.further * (calibration + spec.adapters.rollouts)
        columns = COMPOSED_COLUMNS.value if spec.evaluation.alternatives else 1
        self.composed = share * columns if self.count > 1 else 0

    def _throughput(self) -> Throughput:
        """Estimate the throughput of one GPU with the agent's model: as it was stated, or in inverse proportion to its
        active parameters."""
        assumed = VLLM_THROUGHPUT if self.vllm else ENDPOINT_THROUGHPUT
        if self.node.throughput:
            prefill, decode = self.node.throughput
            return Throughput(prefill, decode, assumed.active, "stated: --throughput")
        scale = assumed.active / self.size.active if self.size else 1
        return assumed._replace(prefill=assumed.prefill * scale, decode=assumed.decode * scale)

    def costs(self) -> list[StageCost]:
        """Estimate the stages that cost anything, and their total."""
        spec, merging = self.spec, self.spec.merging.methods
        workers, concurrency = spec.machine.workers, spec.machine.asking.concurrency
        calibration = self._rollout_stage("environments", self.calibration, self.count * self.shards)
        stages = [
            StageCost("base", 1, seconds=spec.base.steps * spec.base.batch / self._demonstrations()),
            self._rollout_stage("rollouts", self.diagnosis, self.shards, user=True),
            self._with_questions(StageCost("labels", 1), spec.analyst, self._labelling(), concurrency),
            self._with_questions(calibration, spec.synthesizer, self._synthesis(self.count)),
            self._with_questions(StageCost("pairs", 1), spec.synthesizer, self._synthesis(spec.pairs.count)),
            self._rollout_stage("adapters", self.training, self.count, workers, training=True),
            *(self._baseline(row) for row in baselines().values()),
            self._rollout_stage("merging", ("distillation" in merging) * spec.merging.rollouts, training=True),
            self._rollout_stage("controls", self.controls, max(1, math.ceil(self.further)), workers, training=True),
            self._evaluation(),
            self._with_questions(StageCost("causality", 1), spec.analyst, self._causal_labels(), concurrency),
        ]
        if not self.trainable:
            stages = [stage for stage in stages if stage.stage in UNTRAINED]
        costing = [stage for stage in stages if stage.rollouts or stage.use.calls or stage.use.new_input]
        first = [] if spec.base.model else stages[:1]
        return [*first, *costing, total([*first, *costing])]

    def _demonstrations(self) -> float:
        """Count the demonstrations a second of one training in this process, which two processes share."""
        shared = SHARED_TRAINING.value if self.spec.machine.workers > 1 else 1
        return shared * self.rates.demonstrations.value

    def _evaluation(self) -> StageCost:
        """Estimate all arms on the test split; a composition on the tasks that are routed to it."""
        spec = self.spec
        baseline_arms = sum(row.arms(self.count) for row in baselines().values() if row.section(spec).run)
        arms = 1 + self.count + baseline_arms + len(spec.merging.methods) + self.further
        if not spec.evaluation.alternatives:
            # All adapters of a kind, one for each capability, share the tasks.
            kinds = 1 + spec.baselines.solutions.run
            arms -= kinds * max(0, self.count - 1)
        arms += 2 * max(0, spec.curve.points - 1)
        rollouts = (arms + self.composed) * self._arm_rollouts()
        return self._rollout_stage("evaluation", rollouts, math.ceil(arms), spec.machine.workers, user=True)

    def _arm_rollouts(self) -> int:
        """Count the rollouts of an arm that acts on every task."""
        spec = self.spec
        further = split_sizes(spec.benchmark) if spec.evaluation.splits == "all" else {}
        overlapping = further.get("discovery", 0) + further.get("training", 0)
        return (spec.evaluation.tasks + overlapping) * spec.evaluation.trials

    def baseline_rollouts(self, row: Baseline) -> float:
        """Estimate the rollouts that the stage of a row plays."""
        if not row.section(self.spec).run:
            return 0
        rollouts = row.planned_rollouts(self.diagnosis, self.calibration, self.training, self.count)
        starts = [baselines()[stage] for stage in row.rests_on if stage in baselines()]
        return max(0, rollouts - sum(start.diagnosing_rollouts(self.spec, self.attempts) for start in starts))

    def _baseline(self, row: Baseline) -> StageCost:
        """Estimate the stage of a row."""
        rollouts, on_target = self.baseline_rollouts(row), row.target_share(self.spec) > 0
        if row.learns_from == "demonstrations":
            diagnosing = self._rollout_stage(row.name, row.diagnosing_rollouts(self.spec, self.attempts), user=True)
            return self._fine_tuning(row, diagnosing)
        if row.learns_from == "reflection":
            return self._with_reflection(self._rollout_stage(row.name, rollouts, user=on_target))
        rollout_cost = self._rollout_stage(row.name, rollouts, user=on_target, training=row.trains_by_grpo)
        return rollout_cost if row.trains_by_grpo else self._fine_tuning(row, rollout_cost)

    def _fine_tuning(self, row: Baseline, rollouts: StageCost) -> StageCost:
        """Fine-tuning on demonstrations, of which each is taken to be as long as a rollout, beside the rollouts that
        the stage plays."""
        agent = self.episode.agent
        demonstrations, epochs = row.demonstrations(self.spec)
        tokens = demonstrations * (agent.new_input + agent.output)
        cost = replace(rollouts, use=rollouts.use.plus(ModelUse(new_input=tokens)))
        if not tokens or self.episode == EpisodeCost():
            return cost
        seconds = demonstrations * epochs / self._demonstrations()
        gpus = self.trainers(1) if self.served else 0
        if self.served:
            passes = TRAINING_FACTOR.value * tokens * epochs
            seconds = passes / self.throughput.prefill / gpus if self.timed else None
        if seconds is not None:
            seconds += rollouts.seconds or 0
        return replace(cost, gpus=max(gpus, rollouts.gpus), memory=self.memory(True) if gpus else 0, seconds=seconds)

    def _with_reflection(self, cost: StageCost) -> StageCost:
        """Add its questions to a search: one for each minibatch of parent and child, at the most."""
        gepa, agent = self.spec.baselines.gepa, self.episode.agent
        if gepa.model is None or not cost.rollouts:
            return cost
        calls = cost.rollouts / (2 * gepa.minibatch)
        tokens = calls * (gepa.minibatch * (agent.new_input + agent.output) + REFLECTION_TOKENS.value)
        model = Component.model_validate({"_target_": ANALYST, "name": gepa.model})
        return self._with_questions(cost, model, ModelUse(calls, tokens, tokens, calls * QUESTIONS.label))

    @property
    def on_slurm(self) -> bool:
        """True where each job has servers of its own, on GPUs of its own."""
        return self.spec.machine.launcher == "slurm"

    @property
    def at_once(self) -> int:
        """Trainings at once over one fleet of servers."""
        return 1 if self.on_slurm else self.spec.machine.served_at_once

    def trainers(self, jobs: int) -> int:
        """Count the GPUs of one training of so many through servers: one for each of its processes."""
        return self.spec.machine.accelerate.processes * (1 if self.on_slurm else self.spec.machine.places(jobs))

    def servers(self, training: bool) -> int:
        """Count the GPUs of the servers that one job samples through; those of training and endpoint are others."""
        if not self.vllm:
            return self.node.gpus
        machine = self.spec.machine
        slurm = machine.slurm if machine.launcher == "slurm" else None
        elsewhere = self.at_once * machine.accelerate.processes // machine.nodes * training + machine.asking.gpus
        gpus = slurm.gpus if slurm else self.node.gpus
        return machine.vllm.replicas * machine.vllm.gpus or max(1, gpus - elsewhere)

    def _rollout_stage(
        self,
        stage: str,
        rollouts: float,
        jobs: int = 1,
        workers: int = 1,
        *,
        user: bool = False,
        training: bool = False,
    ) -> StageCost:
        """Estimate a stage of rollouts; `user`: in the benchmark itself, with its worker and its simulated user."""
        episode = self.episode if user else self.episode._replace(user=ModelUse(), host=Assumption(0, "no worker"))
        training_gpus = self.trainers(jobs) if training and self.vllm else 0
        parallel, gpus = min(jobs, workers), self.servers(training) + training_gpus
        if self.vllm and self.on_slurm:
            parallel = min(jobs, max(1, self.node.gpus // gpus))
            gpus *= parallel
        elif self.vllm:
            parallel = min(parallel, self.at_once)
            gpus += (parallel - 1) * training_gpus
        cost = StageCost(stage, jobs, rollouts, episode.agent.plus(episode.user).times(rollouts))
        if self.episode == EpisodeCost() or not (self.local or self.served):
            return replace(cost, seconds=None)
        if self.local:
            rate = self.rates.training if training else self.rates.rollouts
            return replace(cost, seconds=rollouts / rate.value * math.ceil(jobs / parallel) / jobs)
        separate = user and self.user is not None and self._is_other_model(self.user.settings())
        seconds = self._served_seconds(cost, episode, parallel, separate=separate, training=training)
        return replace(
            cost,
            gpus=gpus,
            memory=self.memory(training),
            seconds=seconds if self.timed else None,
            money=self._rollout_money(rollouts, episode, separate=separate),
        )

    def _rollout_money(self, rollouts: float, episode: EpisodeCost, *, separate: bool) -> float | None:
        """Price rollouts by a served model: the agent's tokens where its endpoint has a price, and those of another
        model that plays the user."""
        agent, user = episode.agent.times(rollouts), episode.user.times(rollouts)
        input_price, output_price = self.node.price or (0.0, 0.0)
        use = agent if separate else agent.plus(user)
        money = self._price(user) if separate else 0.0
        return None if money is None else money + (use.input * input_price + use.output * output_price) / 1e6

    def _served_seconds(
        self, cost: StageCost, episode: EpisodeCost, parallel: int, *, separate: bool, training: bool
    ) -> float:
        """Estimate the seconds on the wall of rollouts by a served model; `separate`: another model plays the user."""
        rollouts, throughput, servers = cost.rollouts, self.throughput, self.servers(training)
        use = episode.agent if separate else episode.agent.plus(episode.user)
        trained = episode.agent.new_input * self.trainer.get("epochs", 1) if training else 0
        seconds_each = use.new_input / throughput.prefill + use.output / throughput.decode
        # Through servers of our own; without, one model has all GPUs, to sample and to train.
        trainers = self.trainers(cost.jobs) if self.vllm else servers
        sampling = rollouts * seconds_each / servers
        combined = sampling + rollouts * TRAINING_FACTOR.value * trained / throughput.prefill / trainers
        share = math.ceil(cost.jobs / parallel) / cost.jobs if self.vllm else 1
        computing = combined * share if self.on_slurm else max(sampling, combined * share)
        turns = max(1, rollouts / (self.spec.machine.batch * parallel))
        latency = turns * (episode.agent.output + episode.user.output) / REQUEST_RATE.value
        seconds = max(computing, latency, rollouts * episode.host.value / self.processes)
        if self.vllm:
            seconds += SERVER_START.value * (math.ceil(cost.jobs / parallel) if self.on_slurm else 1)
        return seconds

    def _with_questions(self, cost: StageCost, component: Component, use: ModelUse, concurrency: int = 1) -> StageCost:
        """Add the questions of its analyst or synthesizer to a stage."""
        if not use.calls:
            return cost
        endpoint, throughput = self.spec.machine.asking, self.throughput
        separate = self._is_other_model(component.settings()) or endpoint.input_price is not None
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

    def _labelling(self) -> ModelUse:
        """Estimate all questions of an analyst: what it proposes from, one merging, and every rollout in every run."""
        if self.spec.analyst.target != ANALYST:
            return ModelUse()
        settings, runs = self.spec.analyst.settings(), self.spec.labels.runs
        dialogue, labels = settings.get("characters", 16_000) / 4, runs * self.diagnosis
        dialogues = settings.get("failed", 4) + settings.get("passed", 4)
        proposals = runs * settings.get("proposals", 8) * QUESTIONS.label
        tokens = runs * (dialogues * dialogue + QUESTIONS.frame) + proposals + labels * (dialogue + QUESTIONS.frame)
        return ModelUse(
            calls=runs + 1 + labels,
            input=tokens,
            new_input=tokens,
            output=2 * proposals + labels * QUESTIONS.candidates * QUESTIONS.label,
        )

    def _causal_labels(self) -> ModelUse:
        """Estimate a question for each failed rollout of the base on the test split: at the most, for all of them."""
        if self.spec.analyst.target != ANALYST or not self.spec.causality.run or self.spec.evaluation.trials < 2:
            return ModelUse()
        labels = self.spec.evaluation.tasks * self.spec.evaluation.trials
        tokens = labels * (self.spec.analyst.settings().get("characters", 16_000) / 4 + QUESTIONS.frame)
        return ModelUse(labels, tokens, tokens, labels * self.count * QUESTIONS.label)

    def _synthesis(self, count: int) -> ModelUse:
        """Estimate all questions of a synthesizer for so many environments; every one but the first shows the file
        before."""
        if self.spec.synthesizer.target != SYNTHESIZER:
            return ModelUse()
        calls, dialogue = count * self.attempts, self.spec.synthesizer.settings().get("characters", 24_000) / 4
        tokens = calls * (2 * dialogue + QUESTIONS.frame) + (calls - count) * QUESTIONS.file
        return ModelUse(calls, tokens, tokens, calls * QUESTIONS.file)

    def _is_other_model(self, settings: Mapping[str, object]) -> bool:
        """Return whether a model is another one than the agent's, or behind another endpoint."""
        endpoint = settings.get("endpoint", self.spec.machine.asking.endpoint)
        return (settings.get("name"), endpoint) != (self.policy.get("name"), self.policy.get("endpoint"))

    def _price(self, use: ModelUse) -> float | None:
        prices = self.spec.machine.asking
        if prices.input_price is None or prices.output_price is None:
            return None
        return (use.input * prices.input_price + use.output * prices.output_price) / 1e6

    def memory_groups(self, training: bool) -> dict[str, dict[str, float]]:
        """Estimate GiB of one GPU by what holds them, of each group of GPUs: servers, and a trainer of its own; or both
        on the same. {} where the model's size or its dialogues are not known."""
        size, longest = self.size, self.episode.longest
        if size is None or not self.served or not longest:
            return {}
        vllm = self.spec.machine.vllm
        gpus = (vllm.gpus or self.servers(training)) if self.vllm else self.node.gpus
        replicas, at_once = (vllm.replicas, self.at_once) if self.vllm else (1, 1)
        episodes = math.ceil(self.spec.machine.batch * at_once / replicas)
        cache = 4 * size.layers * size.kv_heads * size.head * longest * episodes
        copies = 2 if training and not self.vllm else 1
        serving = {"weights": copies * 2 * size.parameters / gpus, "KV cache": cache / min(gpus, size.kv_heads)}
        if self.vllm:
            groups = {"servers": serving | {"LoRA": 2 * size.lora(self.rank, self.experts)}}
            learning = self._training_memory(size, longest)
            groups |= {"trainer": learning} if training else {}
            if training and vllm.sleeps:
                # The trainer's weights stay where they are while servers are awake.
                groups["servers, awake"] = groups.pop("servers") | {
                    f"trainer's {name}": learning[name] for name in ("weights", "LoRA and its optimizer")
                }
        else:
            sequence = 2 * size.layers * size.hidden + 34 * size.hidden + 8 * size.vocabulary
            learning = {
                "LoRA and its optimizer": 16 * size.lora(self.rank, self.experts),
                "activations and logits": longest * sequence,
            }
            groups = {"GPUs": serving | (learning if training else {})}
        return {group: {name: value / 2**30 for name, value in parts.items()} for group, parts in groups.items()}

    def _training_memory(self, size: ModelSize, longest: int) -> dict[str, float]:
        """Estimate bytes of one GPU that trains, as machine.accelerate has it."""
        accelerate = self.spec.machine.accelerate
        width = {"float64": 8, "float32": 4, "bfloat16": 2}[accelerate.precision]
        shards = accelerate.processes if accelerate.strategy == "fsdp" else 1
        step = self.spec.trainer.group_size * self.spec.trainer.groups_per_step
        rows = accelerate.rows or step // accelerate.processes
        layers = 2 * size.layers + 34 if accelerate.gradient_checkpointing else 34 * size.layers
        return {
            "weights": width * size.parameters / shards,
            **({"two layers gathered": 2 * width * size.parameters / size.layers} if shards > 1 else {}),
            "LoRA and its optimizer": 16 * size.lora(self.rank, self.experts) / shards,
            "activations": rows * longest * layers * size.hidden,
            "logits": rows * longest * 8 * size.vocabulary,
        }

    def memory_parts(self, training: bool) -> dict[str, float]:
        """Return GiB of one GPU of the group that holds more (see `memory_groups`)."""
        return max(self.memory_groups(training).values(), key=lambda parts: sum(parts.values()), default={})

    def memory(self, training: bool) -> float | None:
        """Estimate GiB of one GPU."""
        return sum(self.memory_parts(training).values()) or None
