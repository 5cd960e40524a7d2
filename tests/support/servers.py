"""The embedded server in place of vLLM, and vLLM itself where it is installed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.warm import warm_commands

from captrain.agents.policy import load_policy
from captrain.agents.servers import VllmServer
from captrain.agents.vllm import VLLMPolicy
from captrain.run import compose_spec
from captrain.run.components import Component
from captrain.run.machine import VLLM, Machine

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = Path(os.environ.get("CAPTRAIN_VLLM", ROOT / ".venv-vllm/bin/python")).expanduser()
ABSENT = f"no vLLM at {VLLM_PYTHON}: run `make vllm`, or set CAPTRAIN_VLLM to the interpreter of its environment"
STAND_IN = str(Path(__file__).with_name("stand_in.py"))
SETTINGS = {"temperature": 0.0, "max_turns": 3, "max_tokens": 8}


def machine(**changes: Any) -> Machine:
    """Two replicas of the embedded server, in processes that have their libraries at once; of other commands, in
    processes of their own."""
    python = sys.executable if "command" in changes else str(warm_commands() / "python")
    settings = {"python": python, "command": [STAND_IN], "gpus": 0, "replicas": 2}
    return Machine(workers=1, batch=8, vllm=VLLM(**{**settings, **changes}))


def real_machine() -> Machine:
    """Return a machine with a real vLLM on this CPU, as in conf/machine/vllm_cpu.yaml."""
    overrides = ["machine=vllm_cpu", f"machine.vllm.python={VLLM_PYTHON}"]
    return compose_spec("smoke", 0, overrides, ROOT / "conf").machine


def policy(model: Path, on: Machine | None = None, batch: int | None = None, **settings: Any) -> VLLMPolicy:
    given = {"_target_": "captrain.agents.vllm.VLLMPolicy", **SETTINGS, **settings}
    return load_policy(Component.model_validate(given), model, on or machine(), VLLMPolicy, batch=batch)


def replicas(acting: VLLMPolicy) -> list[VllmServer]:
    """The servers of this process that a policy acts through."""
    return acting.fleet.servers


def servers() -> list[int]:
    """List the processes of embedded servers that this process has started."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    keepers = {pid for pid, parent, args in rows if parent == str(os.getpid()) and "keeper.py" in args}
    return [int(pid) for pid, parent, args in rows if parent in keepers and STAND_IN in args]
