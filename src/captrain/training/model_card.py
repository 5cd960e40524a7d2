"""The model cards of adapters that were trained on rollouts: on which, and by what, from results only."""

from collections import Counter
from collections.abc import Sequence

from captrain.contract import Target
from captrain.records import JsonObject
from captrain.training.jobs import Distillation, Job
from captrain.training.recipe import GRPO


def grpo_model_card(job: Job, trainer: GRPO, targets: Sequence[Target], result: JsonObject) -> str:
    """Write the model card of an adapter in Markdown, from results only."""
    first, last = result["history"][0], result["history"][-1]
    # A hinted rollout says little of what the adapter can do by itself.
    hinted = (
        f"| share of rollouts with a hint | {trainer.hints} |\n| passed of those without, first and last step "
        f"| {first['unhinted_passed']} of {first['unhinted']}, {last['unhinted_passed']} of {last['unhinted']} |\n"
        if "unhinted" in last
        else ""
    )
    plural = "s" if len(targets) > 1 else ""
    groups = Counter[str]()
    for step in result["history"]:
        groups.update(step["places"])
    shares = ", ".join(f"{environment.name} {groups[environment.name]}" for environment in job.environments)
    clip = f"{trainer.clip}" if trainer.clip_high is None else f"{trainer.clip} below, {trainer.clip_high} above"
    start = f"| trained on from the adapter | {job.start.digest} |\n" if job.start else ""
    fingerprints = ", ".join(target.fingerprint for target in targets)
    return f"""---
library_name: peft
base_model: captrain-base
tags: [captrain, grpo, lora]
---
# {job.name}

LoRA adapter (rank {trainer.rank}, alpha {trainer.alpha}) trained with GRPO in the \
environment{plural} {", ".join(f"`{target.name}`" for target in targets)}.

| | |
|---|---|
| content hash | {result["digest"]} |
| environment fingerprint{plural} | {fingerprints} |
{f"| groups of each environment | {shares} |{chr(10)}" if plural else ""}\
| rollouts (of which in discarded constant groups) | {result["rollouts"]} ({result["discarded"]}) |
{start}| group size, groups per step, epochs | {trainer.group_size}, {trainer.groups_per_step}, {trainer.epochs} |
| learning rate, clip | {trainer.learning_rate} {trainer.schedule}, {clip} |
| mean reward, first and last step | {first["reward"]:.3f}, {last["reward"]:.3f} |
| pass rate in its environment, first and last step | {first["success"]:.3f}, {last["success"]:.3f} |
{hinted}| seed | {job.seed} |

Use it with the base it was trained on only: W' = W + (alpha / rank) B A.
"""


def student_model_card(job: Distillation, trainer: GRPO, targets: Sequence[Target], result: JsonObject) -> str:
    """Write the model card of a distilled adapter in Markdown, from results only."""
    first, last = result["history"][0], result["history"][-1]
    far, near = first["divergence"], last["divergence"]
    pairs = zip(targets, job.teachers, strict=True)
    teachers = "\n".join(f"| teacher in `{target.name}` | {teacher.digest} |" for target, teacher in pairs)
    return f"""---
library_name: peft
base_model: captrain-base
tags: [captrain, distillation, lora]
---
# {job.name}

LoRA adapter (rank {trainer.rank}, alpha {trainer.alpha}), distilled from specialists on rollouts of its own.

| | |
|---|---|
| content hash | {result["digest"]} |
{teachers}
| rollouts | {result["rollouts"]} |
| rollouts and passes of a step | {trainer.step_rollouts}, {trainer.epochs} |
| learning rate | {trainer.learning_rate} |
| divergence from the teachers (nats a token), first and last step | {far:.4f}, {near:.4f} |
| pass rate in the environments, first and last step | {first["success"]:.3f}, {last["success"]:.3f} |
| seed | {job.seed} |

Use it with the base it was trained on only: W' = W + (alpha / rank) B A.
"""
