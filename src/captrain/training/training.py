"""One adapter from one job: read from its workspace where it is there already, else trained; and its publication."""

import fcntl
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from captrain.config import build
from captrain.errors import UserError
from captrain.execution import code_digest
from captrain.models import adapter_digest
from captrain.records import digest, publish, publish_json, publish_text
from captrain.training import processes
from captrain.training.jobs import Job, Trained, learner
from captrain.training.recipe import GRPO

WORKSPACES = Path(".cache/adapters")


def train(job: Job) -> Trained:
    """Train one adapter, or return it from its workspace when it is there already.

    Raises:
        UserError: the environment's file or the base is missing or damaged.
        EnvironmentFault: the environment broke its contract.
        UserError: the processes of `machine.accelerate` cannot share the work, or died.
    """
    policy = learner(job.policy, job.base, job.machine, purpose=job.name)
    targets = [place.target(job.machine) for place in job.places]
    trainer = build(job.trainer, GRPO)
    name = digest(
        code_digest(train),
        policy.digest,
        [target.fingerprint for target in targets],
        [job.trainer.target, trainer.identity()],
        job.decisive(),
    )
    workspace = WORKSPACES / name
    workspace.mkdir(parents=True, exist_ok=True)
    with open(workspace / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (workspace / "result.json").exists():
            if job.machine.accelerate.processes > 1:
                processes.launch(job, trainer, workspace)
            else:
                from captrain.training import grpo  # torch and TRL

                publish_json(workspace / "result.json", grpo.fit(trainer, job, policy, targets, workspace))
    result = json.loads((workspace / "result.json").read_text())
    folder = workspace / "adapter"
    try:
        found = adapter_digest(folder)
    except UserError:
        found = "not whole"
    if found != result["digest"]:
        shutil.rmtree(workspace)
        raise UserError(
            f"adapter {job.name} in {workspace} was altered after training ({found}, not {result['digest']})",
            "its workspace has been removed: run `dvc repro` to train it again",
        )
    return Trained(job.name, folder=folder, **result)


def publish_adapters(trained: Sequence[Trained], stage: str, method: str) -> None:
    """Copy adapters to artifacts/<stage>/<digest>, and write results/<stage>: index, ledger, history."""
    index, rows = {}, []
    for one in trained:
        folder = Path("artifacts") / stage / one.digest
        shutil.copytree(one.folder, folder, dirs_exist_ok=True)
        index[one.name] = {
            "digest": one.digest,
            "path": str(folder),
            "rollouts": one.rollouts,
            "discarded": one.discarded,
        }
        rows += [{"adapter": one.name, **step} for step in one.history]
    Path("artifacts", stage).mkdir(parents=True, exist_ok=True)
    columns = ["adapter", "step", "rollouts", "reward", "success", "informative"]
    history = "".join(",".join(str(row[column]) for column in columns) + "\n" for row in rows)
    publish_text(Path("results") / stage / "history.csv", ",".join(columns) + "\n" + history)
    publish(Path("results") / stage / "ledger.jsonl", [one.ledger(stage, method) for one in trained])
    publish_json(Path("results") / stage / "index.json", index)
