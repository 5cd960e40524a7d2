"""The grounds of an estimate: every number that it rests on, with where it comes from, and what to know of it.

Apart from the arithmetic (`captrain.planning`), because these are words: they follow what it has worked out, and
nothing is worked out from them.
"""

import math

from captrain.planning.assumptions import (
    ANALYST,
    COMPOSED,
    CONTROLS,
    DEMONSTRATIONS,
    FILE,
    FRAME,
    LABEL,
    POOL,
    RATES,
    REFLECTED,
    START,
    STREAM,
    SYNTHESIZER,
    TRAINED,
    USABLE,
    WITH_LORA,
    Episode,
    splits,
)
from captrain.planning.estimate import Estimate


def assumptions(estimate: Estimate) -> list[tuple[str, str, str]]:
    """All that the estimate rests on."""
    spec, one = estimate.spec, estimate.episode
    found = [
        ("capabilities selected", str(estimate.count), "spec: capabilities.count, at most"),
        ("attempts at an environment", f"1 to {spec.environments.rounds}", "spec: environments.rounds"),
        ("arms that act together", f"on none to {COMPOSED} times all test tasks", "assumed: as routers choose"),
        ("a rollout: calls, read (new), written", str(one.agent), one.source),
        ("errors, and answers refused", "none", "assumed"),
    ]
    if estimate.local:
        rate = RATES[estimate.policy["precision"], estimate.batch]
        found += [
            ("rollouts a CPU second", f"{rate:g}", "measured here: make bench, in README.md"),
            ("in training", f"{TRAINED:g}", "measured here: one adapter of `default`"),
            ("demonstrations a CPU second", f"{DEMONSTRATIONS:g}", "measured here: the base of `default`"),
            ("processes", str(spec.machine.workers), "spec: machine.workers"),
            ("imports, passports, statistics", "not counted: seconds a stage", "assumed"),
        ]
    if one.user.calls:
        found.append(("its simulated user, the same", str(one.user), one.source))
    if spec.controls.run:
        most = f"0 to {CONTROLS * estimate.count}"
        found.append(("capabilities that only controls take", most, "assumed: as the labels have it"))
    found += [
        (f"a demonstration of {name}", "as long as a rollout", "assumed")
        for name, asked in (("adp", spec.baselines.adp), ("references", spec.baselines.references))
        if asked.run
    ]
    if spec.baselines.gepa.run and spec.baselines.gepa.model:
        found.append(("questions of gepa", f"{REFLECTED:,} tokens and the minibatch's dialogues", "assumed"))
    if "training" in (there := splits(spec.benchmark)) and (most := again(estimate)):
        said = ", ".join(f"{name} {times:,.0f}" for name, times in most.items())
        found.append(("times that a training task is used", said, f"spec: {there['training']} tasks; assumed: in turn"))
    if estimate.served:
        found += _serving(estimate)
    if spec.analyst.target == ANALYST or spec.synthesizer.target == SYNTHESIZER:
        said = f"{FRAME:,} and 1 for 4 characters; {LABEL} a label of {POOL}; {FILE:,} a file"
        found.append(("tokens of questions and answers", said, "assumed"))
    return found


def _serving(estimate: Estimate) -> list[tuple[str, str, str]]:
    node, size, machine = estimate.node, estimate.size, estimate.spec.machine
    given = WITH_LORA if estimate.vllm else "assumed for 3.3 active, in proportion; --throughput"
    given = "stated: --throughput" if node.throughput else given
    known = f"{size.parameters / 1e9:.3g}, {size.active / 1e9:.2g} of them active" if size else "not known"
    source = "stated: --parameters; dense, 128 times as wide as deep" if node.parameters else "published"
    trained = "q, k, v, o" + (" and feed-forward" if size and size.inner else ": experts are fused")
    copies = "2, sharded: to sample and to train"
    at_once = ("jobs at once", f"{machine.workers} of adapters and evaluation", "spec: machine.workers")
    started: list[tuple[str, str, str]] = []
    if estimate.vllm:
        copies = "one in bfloat16 on the trainer's GPU, beside the servers'"
        slurm = machine.launcher == "slurm"
        fit = f"1 on {node.gpus} GPUs, one after another"
        if slurm:
            fit = f"{max(1, node.gpus // (estimate.servers(True) + 1))} of training on {node.gpus} GPUs"
        at_once = ("jobs at once", fit, f"spec: machine.launcher = {machine.launcher}; --gpus")
        held = f"{estimate.servers(True)} of its servers, and 1 to train"
        started = [
            ("GPUs of a job", held, "spec: machine.vllm.replicas x gpus"),
            ("servers are healthy after", f"{START:g} s in each job", "assumed"),
            ("simulated user, analyst, synthesizer", "at an endpoint of their own", "spec: their GPUs not counted"),
        ]
    return [
        ("in a synthesized environment", "the same, its user a script", "assumed"),
        ("longest dialogue", f"{estimate.episode.longest:,} tokens", estimate.episode.source),
        (f"{estimate.model}: billions", known, source if size else "--parameters states it"),
        ("LoRA", f"rank {estimate.trainer.get('rank', 16)} on {trained}", "spec: trainer.rank; assumed"),
        ("copies of its weights in training", copies, "assumed"),
        ("GPUs", f"{node.gpus} of {node.memory:g} GiB, {USABLE:.0%} usable", "assumed; --gpus, --gpu-memory"),
        *started,
        ("tokens a second of a GPU", f"{estimate.prefill:,.0f} read, {estimate.decode:,.0f} written", given),
        ("tokens a second of a request", f"{STREAM:g}", "assumed"),
        ("reading a dialogue", "each token once: prefixes are cached", "assumed"),
        ("training on a token", "4 times reading it", "assumed: recomputed, twice backward"),
        ("episodes at once", f"{machine.batch} a job", "spec: machine.batch"),
        at_once,
        ("worker of the benchmark", f"{estimate.episode.host:g} s a rollout", "measured here"),
        ("its processes", str(estimate.processes), "spec: machine.benchmarks"),
    ]


def warnings(estimate: Estimate, money: float | None) -> list[str]:
    """What to know that does not make the settings impossible."""
    spec, found = estimate.spec, []
    if estimate.episode == Episode():
        found.append(f"nothing is known of rollouts by {spec.policy.target} in {spec.benchmark.target}: counts only")
    if estimate.served and estimate.size is None:
        found.append(f"the size of {estimate.model} is not known: state it with --parameters, in billions")
    if money is None:
        found.append("machine.asking.input_price and output_price, for a million tokens, show the money")
    if not (estimate.local or estimate.vllm):
        found.append("an endpoint that somebody else runs cannot be trained through: it stops after `environments`")
    if estimate.vllm and estimate.size:
        found.append(
            "training is planned in bfloat16, one sequence at a time; this version's trainer holds weights in "
            "float32 and a whole step at once"
        )
    for name, times in again(estimate).items():
        if times > 1:
            found.append(
                f"{name} uses each of {splits(estimate.spec.benchmark)['training']} training tasks "
                f"{math.ceil(times):,} times, in other trials"
            )
    if estimate.served and spec.benchmark.settings().get("user", "") is None:
        found.append("benchmark.user is null: a script plays the user, for checks and not for results")
    return found


def again(estimate: Estimate) -> dict[str, float]:
    """Stages that train on the target -> how often each of its training tasks is used; {} where there is no end."""
    spec = estimate.spec
    there, run = splits(spec.benchmark).get("training"), spec.baselines
    if there is None:
        return {}
    groups = {
        "grpo_target": run.grpo_target.run * estimate.trace,
        "ramp": run.ramp.run * estimate.training * min(1.0, run.ramp.start + run.ramp.slope / 2),
    }
    return {name: count / spec.trainer.group_size / there for name, count in groups.items() if count}
