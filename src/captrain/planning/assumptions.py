"""Numbers for plans that are not in the configuration: sizes of models and benchmarks, cost of a rollout, speeds.

Each number has a source, which the plan prints. Update a number here when it is measured again. The arithmetic is in
`captrain.planning.estimate`.
"""

import math
import time
from typing import NamedTuple

import numpy as np

from captrain.benchmarks import divided
from captrain.environments import EMBEDDED
from captrain.run import Component, Spec

LOCAL = "captrain.agents.local.LocalPolicy"
SERVED = "captrain.agents.openai.OpenAIPolicy"
VLLM = "captrain.agents.vllm.VLLMPolicy"
ANALYST = "captrain.capabilities.openai.OpenAIAnalyst"
SYNTHESIZER = "captrain.environments.openai.OpenAISynthesizer"
BFCL = "captrain.benchmarks.bfcl.Bfcl"
AGENTDOJO = "captrain.benchmarks.agentdojo.AgentDojo"
TAU2 = "captrain.benchmarks.tau2.Tau2"
TOOLSANDBOX = "captrain.benchmarks.toolsandbox.ToolSandbox"
TAU2_DOMAINS = {"airline": (30, 20), "retail": (74, 40), "mock": (7, 3)}
"""Training and test tasks of each domain."""
BFCL_TASKS, TOOLSANDBOX_SCENARIOS = 200, 101
"""Tasks in a category of BFCL; scenarios of ToolSandbox that need no outside service."""
AGENTDOJO_SCENARIOS = {
    "workspace": "11191111111111111151111311",
    "travel": "1" * 20,
    "banking": "1" * 16,
    "slack": "1113113311113",
}
"""Tasks in each scenario of a suite of AgentDojo, in order; a combined task is in the scenario of its parts."""


class Assumption(NamedTuple):
    """A number and its source, as the plan prints it."""

    value: float
    source: str


class Throughput(NamedTuple):
    """Tokens a second of one GPU, read and written, of a model with `active` parameters. Speed is inverse to size."""

    prefill: float
    decode: float
    active: float
    source: str


class BaseSpeed(NamedTuple):
    """Speed of a base in this process, per CPU second: rollouts, rollouts in training, and demonstrations."""

    rollouts: Assumption
    training: Assumption
    demonstrations: Assumption


ROLLOUT_RATES = {"float64": 277.1, "float32": 488.5}
"""Precision -> rollouts per CPU second of the embedded base, with one rollout per task."""
SMOLLM = "measured here: experiment=smollm"
PRETRAINED_RATES = BaseSpeed(Assumption(0.6, SMOLLM), Assumption(0.9, SMOLLM), Assumption(0.35, SMOLLM))
SHARED_TRAINING = Assumption(1.45, "measured here: the base of `default`")
"""Speed-up if two processes train one model."""
STAGE_START = Assumption(2.0, "measured here")
"""Overhead of a stage in seconds, for imports and for hashing its outputs."""
PASSPORT = Assumption(4.0, "measured here: the environments of `default`")
"""Seconds to examine a derived environment."""
ROUTING = Assumption(15.0, "measured here: the routes of `default`")
"""Seconds to fit the routers and route every task."""
REFERENCE_SPEED = Assumption(46_600.0, "measured here: an AMD EPYC core, 37 GFLOP/s in float64")
"""Products of a 96x64 and a 64x64 float64 matrix per second, on the machine where the rates above were measured."""


def machine_speed() -> float:
    """Measure the speed of one core here relative to the reference machine, by multiplying small float64 matrices.

    This takes 0.2 seconds. Other processes hardly affect it, because it takes the CPU time of the best of twenty short
    windows.
    """
    left, right, best = np.ones((96, 64)), np.ones((64, 64)), 0.0
    for _ in range(20):
        count, start, elapsed = 0, time.process_time(), 0.0
        while elapsed < 0.01:
            for _ in range(20):
                np.matmul(left, right)
            count, elapsed = count + 20, time.process_time() - start
        best = max(best, count / elapsed)
    return best / REFERENCE_SPEED.value


def local_rates(spec: Spec, speed: float) -> BaseSpeed:
    """Return the speed of the embedded or pretrained base, on a machine `speed` times as fast as the reference."""
    rates = PRETRAINED_RATES if spec.base.pretrained else _embedded_rates(spec)
    return BaseSpeed(*(rate._replace(value=rate.value * speed) for rate in rates))


def _embedded_rates(spec: Spec) -> BaseSpeed:
    precision = spec.policy.settings().get("precision", "float64")
    rate = ROLLOUT_RATES.get(precision, ROLLOUT_RATES["float32"])
    return BaseSpeed(
        Assumption(rate, "measured here: make bench, in docs/speed.md"),
        Assumption(100.0, "measured here: one adapter of `default`"),
        Assumption(100.0, "measured here: the base of `default`"),
    )


VLLM_THROUGHPUT = Throughput(
    prefill=10_000.0,
    decode=1_000.0,
    active=3.3e9,
    source=("published: 811 written at 16 requests, one GPU, Qwen3-Coder-30B-A3B with a LoRA in vLLM; reading assumed"),
)
"""Throughput of our own servers. A single request gets 811 / 16, `REQUEST_RATE`."""
ENDPOINT_THROUGHPUT = VLLM_THROUGHPUT._replace(source="assumed for 3.3 active, in proportion; --throughput")
REQUEST_RATE = Assumption(50.0, "assumed")
"""Tokens a second of one request among many others."""
TRAINING_FACTOR = Assumption(3.5, "measured here: one H200, layers computed again")
"""Time to train on a token, as a multiple of the time to read it."""
USABLE_MEMORY = Assumption(0.9, "assumed")
"""Share of a GPU's memory that can be used."""
SERVER_START = Assumption(300.0, "assumed")
"""Seconds until the servers of a job are healthy: they read weights and capture graphs."""
REFLECTION_TOKENS = Assumption(2_500, "assumed")
"""Tokens of a question of GEPA, without the dialogues of its minibatch."""
COMPOSED_COLUMNS = Assumption(4, "assumed: the routers decide")
"""Routers that may give a task to several adapters at once: the chosen one, sets, gate, top_p."""
CONTROL_CHOICES = Assumption(3, "assumed: the labels decide")
"""Selections of capabilities that TRACE's is compared with (`captrain.comparison.baselines.controls`)."""
CANDIDATES, LABEL_TOKENS, FILE_TOKENS, FRAME_TOKENS = 10, 80, 4_000, 3_000
"""Questions to an analyst or synthesizer: candidates in one question; tokens of a label, of an environment's file, and
of instructions with schemas."""


class ModelSize(NamedTuple):
    """Shape of a model. `inner`: width of its feed-forward layers; 0 if a layer has `experts` instead, each
    `expert_inner` wide. A token goes to `top_k` experts."""

    parameters: float
    active: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocabulary: int = 151_936
    source: str = "published"
    experts: int = 0
    expert_inner: int = 0
    top_k: int = 8

    def lora(self, rank: int, experts: bool = False) -> int:
        """Count the parameters of one saved adapter, with those of the experts if `experts`."""
        attention = 4 * self.hidden + 2 * (self.heads + self.kv_heads) * self.head
        dense = 3 * (self.hidden + self.inner) if self.inner else 0
        mixture = 3 * self.experts * (self.hidden + self.expert_inner) if experts else 0
        return rank * self.layers * (attention + dense + mixture)

    def activations(self, checkpointed: bool) -> float:
        """Estimate the bytes of a token in training on a GPU, in bfloat16 with LoRA on all linear layers.

        Fitted by least squares to measured peaks of Qwen3's dense layers on an H200 (docs/gpus.md) and
        rounded up. The estimate for mixtures is checked against two measured peaks of Qwen3-30B-A3B's shape.
        """
        wide = 11 * self.inner + (self.top_k * (11 * self.expert_inner + 6 * self.hidden) if self.experts else 0)
        layer = 32 * self.hidden + (13 * self.heads + 10 * self.kv_heads) * self.head + wide
        layers = 2 * self.hidden * self.layers + layer if checkpointed else layer * self.layers
        return layers + 24 * self.hidden  # of the head, which TRL computes in tiles


SIZES = {
    "Qwen/Qwen3-30B-A3B-Instruct-2507": ModelSize(
        30.5e9, 3.3e9, 48, 2048, 32, 4, 128, 0, experts=128, expert_inner=768
    ),
    "Qwen/Qwen3-4B-Instruct-2507": ModelSize(4.0e9, 4.0e9, 36, 2560, 32, 8, 128, 9728),
}


class ModelUse(NamedTuple):
    """Calls of a model, and tokens of input and output. A served model reads the whole dialogue in each call;
    `new_input` counts every token once."""

    calls: float = 0
    input: float = 0
    new_input: float = 0
    output: float = 0

    def times(self, count: float) -> "ModelUse":
        """Return the use of `count` times this."""
        return ModelUse(*(count * amount for amount in self))

    def plus(self, more: "ModelUse") -> "ModelUse":
        """Return the sum with another use."""
        return ModelUse(*map(sum, zip(self, more, strict=True)))


class EpisodeCost(NamedTuple):
    """Cost of one rollout: use of the agent and of a simulated user, seconds of the benchmark's worker, and tokens of
    the longest dialogue."""

    agent: ModelUse = ModelUse()
    user: ModelUse = ModelUse()
    host: Assumption = Assumption(0, "measured here")
    longest: int = 0
    source: str = "not known"


EPISODE_COSTS = {
    (EMBEDDED, LOCAL): EpisodeCost(ModelUse(3, 40, 40, 15), source="measured here: the ledgers in results/"),
    (TAU2, SERVED): EpisodeCost(
        agent=ModelUse(11.4, 57_000, 6_700, 780),
        user=ModelUse(7.1, 6_100, 1_300, 250),
        host=Assumption(0.8, "measured here"),
        longest=13_000,
        source="published: 60 rollouts of gpt-4.1 in tau2-bench 0.2",
    ),
    (TOOLSANDBOX, SERVED): EpisodeCost(
        agent=ModelUse(8, 24_000, 4_000, 500),
        user=ModelUse(4, 6_000, 2_000, 80),
        host=Assumption(0.4, "measured here"),
        longest=10_000,
        source="assumed",
    ),
}


def dense_size(parameters: float) -> ModelSize:
    """Return the shape of a usual dense model: 12 x layers x hidden^2 parameters, hidden = 128 x layers."""
    layers = max(1, round((parameters / (12 * 128**2)) ** (1 / 3)))
    return ModelSize(
        parameters=parameters,
        active=parameters,
        layers=layers,
        hidden=128 * layers,
        heads=layers,
        kv_heads=min(8, layers),
        head=128,
        inner=1024 * layers // 3,
        source="stated: --parameters; dense, 128 times as wide as deep",
    )


def split_sizes(benchmark: Component) -> dict[str, int]:
    """Return the largest number of tasks in each split; {} if tasks are made on demand or the number is unknown."""
    settings, target = benchmark.settings(), benchmark.target
    if target == TAU2:
        domains, share = [TAU2_DOMAINS[name] for name in settings["domains"]], settings.get("discovery", 0.62)
        discovery = sum(len(divided([""] * train, (share, 1 - share))[0]) for train, _ in domains)
        training, test = (sum(sizes) for sizes in zip(*domains, strict=True))
        return {"discovery": discovery, "training": training - discovery, "test": test}
    if target in (BFCL, AGENTDOJO):
        discovery, training = settings.get("discovery", 0.4), settings.get("training", 0.3)
        shares = (discovery, training, 1 - discovery - training)
        strata = [AGENTDOJO_SCENARIOS[name] for name in settings.get("suites", [])]
        strata = strata or [str(len(settings["categories"])) * BFCL_TASKS]
        parts = zip(*(divided(sizes, shares) for sizes in strata), strict=True)
        totals = [sum(int(size) for stratum in part for size in stratum) for part in parts]
        return dict(zip(("discovery", "training", "test"), totals, strict=True))
    if target == TOOLSANDBOX:
        # Whole families are divided, so a split may exceed its share by some scenarios.
        discovery, training = settings.get("discovery", 0.35), settings.get("training", 0.2)
        shares = {"discovery": discovery, "training": training, "test": 1 - discovery - training}
        return {name: math.floor(TOOLSANDBOX_SCENARIOS * (share + 0.07)) for name, share in shares.items()}
    return {}
