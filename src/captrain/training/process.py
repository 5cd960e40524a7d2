"""One process of a training that several share, as `accelerate launch` starts it.

python -m captrain.training.process JOBFILE
"""

import os
import pickle
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from captrain.errors import InfrastructureError, UserError
from captrain.records import publish_json
from captrain.training.collectives import rank


def train(order: Path) -> None:
    """Run as one process of a training.

    Args:
        order: the pickled training, in its workspace.
    """
    from torch import distributed

    from captrain.training.processes import RESULT, SharedTraining

    training: SharedTraining = pickle.loads(order.read_bytes())
    if training.accelerate.strategy == "fsdp":
        _shard_on_cpu()
    result = training.fit(order.parent)
    if rank() == 0:
        publish_json(order.parent / RESULT, result)
    distributed.destroy_process_group()


def _shard_on_cpu() -> None:
    """Let accelerate take FSDP where there is no GPU: torch shards over gloo as well, but accelerate's state passes
    the plugin over."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    initialise = AcceleratorState.__init__

    def initialise_on_cpu(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        initialise(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = initialise_on_cpu


def main() -> None:
    """Run a process, and leave the error that it cannot mend in the workspace."""
    from captrain.execution import launch

    launch.become_worker(os.getppid())
    order = Path(sys.argv[1])
    try:
        train(order)
    except Exception as error:
        expected = isinstance(error, UserError | InfrastructureError)
        aside = order.with_name(f"failure-{rank()}.pkl")
        aside.write_bytes(pickle.dumps(error if expected else RuntimeError(traceback.format_exc())))
        # Of several the first: the end of one process makes others fail.
        with suppress(FileExistsError):
            os.link(aside, order.with_name("failure.pkl"))
        # At once: others wait for nothing that is still to come.
        os._exit(2)


if __name__ == "__main__":
    main()
