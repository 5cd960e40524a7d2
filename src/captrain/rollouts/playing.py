"""A benchmark played by a policy from Python, with defaults: `captrain.play(CalendarDesk(), policy, tasks=20)`."""

import inspect
from pathlib import Path
from tempfile import TemporaryDirectory

from captrain.contract import Environment, Target
from captrain.policies import Policy
from captrain.records import Purpose, Rollout, Split, digest, file_digest
from captrain.rollouts.collection import collect

PURPOSES: dict[Split, Purpose] = {"discovery": "diagnosis", "training": "training", "test": "evaluation"}
"""Purpose of a rollout by the split that its task is of."""


def play(
    benchmark: Environment | type[Environment],
    policy: Policy,
    *,
    tasks: int = 20,
    split: Split = "discovery",
    trials: int = 1,
    seed: int = 0,
) -> list[Rollout]:
    """Play the first tasks of a benchmark.

    Args:
        benchmark: of the contract, or its class, which is built with its defaults.
        policy: who acts.
        tasks: so many, of the split.
        split: discovery, training or test.
        trials: rollouts of each task.
        seed: of all randomness.

    Returns:
        Rollouts in the order (task, trial), as `captrain.diagnose` takes them.

    Raises:
        EnvironmentFault: the benchmark broke its contract.
        InfrastructureError: most rollouts came to an error.
    """
    environment = benchmark() if isinstance(benchmark, type) else benchmark
    kind = type(environment)
    source = f"{kind.__module__}:{kind.__qualname__}"
    target = Target(environment, source, digest(source, file_digest(Path(inspect.getfile(kind)))))
    # What else decides its behaviour is not known here: nothing of it is kept for another call.
    with TemporaryDirectory() as journals:
        return collect(
            policy,
            target,
            target.tasks(split, tasks),
            purpose=PURPOSES[split],
            seed=seed,
            trials=trials,
            journals=Path(journals),
        )
