"""What a plan takes as given: sizes of models and benchmarks, what a rollout takes, how fast things are.

Numbers that no setting holds, each with where it comes from, apart from the arithmetic on them (`captrain.planning`):
what is measured anew is changed here.
"""

import math
from typing import NamedTuple

from captrain.benchmarks import divided
from captrain.config import Component

LOCAL = "captrain.policies.local.LocalPolicy"
SERVED = "captrain.policies.openai.OpenAIPolicy"
VLLM = "captrain.policies.vllm.VLLMPolicy"
ANALYST = "captrain.capabilities.openai.OpenAIAnalyst"
SYNTHESIZER = "captrain.environments.openai.OpenAISynthesizer"
SERVICEDESK = "captrain.benchmarks.servicedesk.ServiceDesk"
TAU2 = "captrain.benchmarks.tau2.Tau2"
TOOLSANDBOX = "captrain.benchmarks.toolsandbox.ToolSandbox"

RATES = {("float64", 64): 121.2, ("float64", 256): 155.0, ("float32", 64): 195.0, ("float32", 256): 262.2}
"""Rollouts a CPU second of the embedded base, by precision and batch: the table of `make bench` in README.md."""
TRAINED, DEMONSTRATIONS = 40.0, 100.0
"""Of the same in training, updates included; and what it is made from."""
PREFILL, DECODE, ACTIVE = 10_000.0, 1_000.0, 3.3e9
"""Tokens a second of one GPU for a model with so many active parameters; in inverse proportion to them."""
STREAM, USABLE = 50.0, 0.9
"""Tokens a second of one request among many; share of a GPU's memory that is given out."""
WITH_LORA = "published: 811 written at 16 requests, one GPU, Qwen3-Coder-30B-A3B with a LoRA in vLLM; reading assumed"
"""Where PREFILL, DECODE and STREAM come from for servers of our own: 811 / 16 is a request's share."""
START = 300.0
"""Seconds until the servers of a job are healthy: weights are read and graphs are captured."""
REFLECTED = 2_500
"""Tokens of a question of GEPA beyond the dialogues of its minibatch."""
COMPOSED = 3
"""Columns of the routes that may give a task to several adapters at once: the chosen router's, sets, top_p."""
CONTROLS = 3
"""Choices of capabilities that TRACE's is held against (`captrain.baselines.controls`)."""
POOL, LABEL, FILE, FRAME = 10, 80, 4_000, 3_000
"""Of questions: candidates judged in one; tokens of a label, of an environment, of instructions and schemas."""


class Size(NamedTuple):
    """Shape of a model. `inner`: width of its feed-forward layers, 0 where experts are fused and take no LoRA."""

    parameters: float
    active: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocabulary: int = 151_936

    def lora(self, rank: int) -> int:
        """Parameters of one adapter."""
        attention = 4 * self.hidden + 2 * (self.heads + self.kv_heads) * self.head
        return rank * self.layers * (attention + (3 * (self.hidden + self.inner) if self.inner else 0))


SIZES = {
    "Qwen/Qwen3-30B-A3B-Instruct-2507": Size(30.5e9, 3.3e9, 48, 2048, 32, 4, 128, 0),
    "Qwen/Qwen3-4B-Instruct-2507": Size(4.0e9, 4.0e9, 36, 2560, 32, 8, 128, 9728),
}


class Took(NamedTuple):
    """Calls of a model, tokens read (a served model reads the dialogue anew in each call), those of them that are new,
    and tokens written."""

    calls: float = 0
    read: float = 0
    new: float = 0
    written: float = 0

    def times(self, count: float) -> "Took":
        """So many times as much."""
        return Took(*(count * one for one in self))

    def plus(self, other: "Took") -> "Took":
        """Both together."""
        return Took(*map(sum, zip(self, other, strict=True)))

    def __str__(self) -> str:
        return f"{self.calls:g}, {self.read:,g} ({self.new:,g}), {self.written:,g} tokens"


class Episode(NamedTuple):
    """What one rollout takes: of the agent, of a simulated user, seconds of the benchmark's worker; tokens of the
    longest dialogue; and where that comes from."""

    agent: Took = Took()
    user: Took = Took()
    host: float = 0
    longest: int = 0
    source: str = "not known"


EPISODES = {
    (SERVICEDESK, LOCAL): Episode(Took(3, 38, 38, 14), source="measured here: the ledgers in results/"),
    (TAU2, SERVED): Episode(
        Took(11.4, 57_000, 6_700, 780), Took(7.1, 6_100, 1_300, 250), 0.8, 13_000,
        "published: 60 rollouts of gpt-4.1 in tau2-bench 0.2",
    ),
    (TOOLSANDBOX, SERVED): Episode(Took(8, 24_000, 4_000, 500), Took(4, 6_000, 2_000, 80), 0.4, 10_000, "assumed"),
}  # fmt: skip


def size_of(parameters: float) -> Size:
    """A dense model of the usual proportions: 12 x layers x hidden^2 parameters, hidden = 128 x layers."""
    layers = max(1, round((parameters / (12 * 128**2)) ** (1 / 3)))
    return Size(parameters, parameters, layers, 128 * layers, layers, min(8, layers), 128, 1024 * layers // 3)


def splits(benchmark: Component) -> dict[str, int]:
    """Tasks of each split, at most; {} where tasks are made on demand, or nothing is known."""
    settings = benchmark.settings()
    if benchmark.target == TAU2:
        domains = [{"airline": (30, 20), "retail": (74, 40), "mock": (7, 3)}[name] for name in settings["domains"]]
        share = settings.get("discovery", 0.62)
        found = [len(divided([""] * train, (share, 1 - share))[0]) for train, _ in domains]
        trains = sum(train for train, _ in domains)
        return {"discovery": sum(found), "training": trains - sum(found), "test": sum(test for _, test in domains)}
    if benchmark.target == TOOLSANDBOX:
        # Whole families are divided, so that a split may exceed its share by some scenarios.
        shares = {"discovery": settings.get("discovery", 0.35), "training": settings.get("training", 0.2)}
        shares["test"] = 1 - sum(shares.values())
        return {name: math.floor(101 * (share + 0.07)) for name, share in shares.items()}
    return {}
