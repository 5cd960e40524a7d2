"""Export of environments: a package for OpenEnv, verifiers or TRL around an environment file.

A package does not need captrain. It holds the unchanged environment file, code for the standard from the templates
beside this module, and the passport. Tools keep the target's names and schemas; the reward is captrain's score of the
recorded messages.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Literal, get_args

from captrain.errors import UserError
from captrain.records import JsonObject, Message, Passport, place_aside, publish_folder, without_secrets

Standard = Literal["openenv", "verifiers", "trl"]
RESERVED = {"openenv": {"reset", "step", "state", "close"}, "verifiers": set[str](), "trl": {"reset", "get_reward"}}
"""Names that a standard reserves."""
LAYOUTS: dict[Standard, dict[str, str]] = {
    "openenv": {
        "__init__.py": "openenv/init.py",
        "client.py": "openenv/client.py",
        "episodes.py": "episodes.py",
        "models.py": "openenv/models.py",
        "pyproject.toml": "openenv/pyproject.toml",
        "server/Dockerfile": "openenv/Dockerfile",
        "server/__init__.py": "empty.py",
        "server/app.py": "openenv/app.py",
        "server/environment_server.py": "openenv/server.py",
    },
    "verifiers": {
        "$module/__init__.py": "verifiers/init.py",
        "$module/episodes.py": "episodes.py",
        "$module/taskset.py": "verifiers/taskset.py",
        "$module/tools.py": "verifiers/tools.py",
        "pyproject.toml": "verifiers/pyproject.toml",
    },
    "trl": {
        "$module/__init__.py": "trl/init.py",
        "$module/episodes.py": "episodes.py",
        "$module/training.py": "trl/training.py",
        "pyproject.toml": "trl/pyproject.toml",
    },
}
"""Files of a package, and their templates."""
GRADES = {
    "semantic.oracle_max": "reward of the reference solution",
    "semantic.floor_gap": "reward of doing nothing",
    "semantic.canary_floor": "reward of the broken solution",
    "semantic.no_solution_leakage": "calls given away",
    "semantic.verifier_determinism": "same play, same observations",
    "runtime.seed_control": "same seed, same task in a fresh process",
    "statistical.difficulty_separation": "spread of rewards",
    "statistical.reward_reachability": "pass rate of the base",
}
"""OpenEnv's names for checks of a passport; OpenEnv has no graders for these yet."""
FLOOR = "reward of doing nothing"


@dataclass(frozen=True)
class Package:
    """Content of a package.

    Attributes:
        text: the environment file.
        tools: OpenAI schemas.
        tasks: number of tasks in each split.
        solution: the reference of the first training task, as assistant messages.
        origin: class that a program derived the file from; "" if the file was written.
    """

    text: bytes
    passport: Passport
    tools: Sequence[JsonObject]
    tasks: Mapping[str, int]
    solution: Sequence[Message]
    origin: str = ""

    @property
    def module(self) -> str:
        """Name of the Python package."""
        return "captrain_" + self.passport.capability.replace("+", "_and_")


def write_package(package: Package, standard: Standard, out: Path) -> list[Path]:
    """Write a package into a folder.

    Args:
        package: its content.
        standard: openenv, verifiers or trl.
        out: the folder; it appears complete or not at all.

    Returns:
        The files, in order.

    Raises:
        UserError: the folder is not empty, or the standard cannot express the tools.
    """
    if standard not in get_args(Standard):
        raise UserError(f"there is no standard {standard!r}", f"choose one of {', '.join(get_args(Standard))}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty", "name another folder with --out")
    _check_tools(package, standard)
    out.parent.mkdir(parents=True, exist_ok=True)
    with place_aside(out, f".{os.getpid()}") as aside:
        for name, text in _texts(package, standard).items():
            path = aside / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else without_secrets(text).encode())
        if out.exists():
            out.rmdir()
        publish_folder(aside, out)
    return sorted(path for path in out.rglob("*") if path.is_file())


def _check_tools(package: Package, standard: Standard) -> None:
    """Check that the standard can express the tools."""
    for tool in package.tools:
        function = tool["function"]
        name, parameters = function["name"], (function.get("parameters") or {}).get("properties") or {}
        if name in RESERVED[standard]:
            raise UserError(f"{standard} reserves the name {name}, which a tool has", "choose another standard")
        unspeakable = [word for word in (name, *parameters) if not word.isidentifier() or word.startswith("_")]
        if standard == "trl" and unspeakable:
            raise UserError(
                f"TRL's tools are Python methods, and {unspeakable[0]} of {name} is no valid name",
                "choose another standard",
            )


def _texts(package: Package, standard: Standard) -> dict[str, str | bytes]:
    """Return the files of a package, by their paths in it."""
    passport, module = package.passport, package.module
    names = {
        "environment": passport.capability,
        "module": module,
        "dashed": module.replace("_", "-"),
        "title": "".join(part.capitalize() for part in module.split("_")[1:]),
        "tasks": repr(dict(package.tasks)),
        "splits": f"One of {', '.join(package.tasks)}.",
    }
    root = files("captrain").joinpath("interop/templates")
    contents: dict[str, str | bytes] = {
        Template(path).substitute(names): Template(
            root.joinpath(f"{source}.txt").read_text(encoding="utf-8")
        ).substitute(names)
        for path, source in LAYOUTS[standard].items()
    }
    folder = "" if standard == "openenv" else f"{module}/"
    contents[f"{folder}environment.py"] = package.text
    contents[f"{folder}passport.json"] = passport.model_dump_json(indent=1) + "\n"
    rows = ["| check | measured | bound |", "|---|---|---|"]
    for check in passport.checks:
        name, bound = (re.sub(r"[|\n\r`<>\[\]]", " ", text) for text in (check.name, check.bound))
        rows.append(f"| {name} | {'' if check.measured is None else f'{check.measured:g}'} | {bound} |")
    contents["README.md"] = Template(root.joinpath(f"{standard}/README.md.txt").read_text(encoding="utf-8")).substitute(
        names, passport="\n".join(rows), confinement=_confinement(package)
    )
    if standard == "openenv":
        contents["openenv.yaml"] = _openenv_manifest(package)
        contents["validation/runtime.json"] = json.dumps(_runtime_plan(package), indent=1) + "\n"
    return contents


def _confinement(package: Package) -> str:
    if package.passport.trusted:
        return "captrain wrote the environment file."
    if package.origin:
        return (
            f"**The environment file holds the source of `{package.origin}`**, narrowed by captrain's own text to the "
            "tasks that exercise one capability. captrain ran it in a sandbox only; here it runs with your rights."
        )
    return (
        "**The environment file was written by a language model or by somebody else.** captrain ran it in a sandbox "
        "only; here it runs with your rights. Run the package in a container."
    )


def _openenv_manifest(package: Package) -> str:
    """Return `openenv.yaml`: settings for OpenEnv's validation, and below `passport` checks that it has no grader
    for."""
    import yaml

    passport = package.passport
    floor = next((check.measured for check in passport.checks if check.name == FLOOR), None) or 0.0
    grades = {
        grade: {"check": check.name, "measured": check.measured, "bound": check.bound, "passed": check.passed}
        for grade, name in GRADES.items()
        for check in passport.checks
        if check.name == name
    }
    validation = {
        # The reward of a step is its change of the score, which may be negative.
        "reward": {"range": [-1.0, 1.0], "oracle_tolerance": 0.0, "floor_margin": int((1 - floor) * 100) / 100},
        "resources": {"cpu": 1.0, "memory_mb": 512, "disk_mb": 256, "episode_timeout_s": 300.0},
        "network": {"mode": "no-network"},
        "capabilities": {
            "verifier": {"kind": "reward_channel"},
            "task_api": True,
            "declared_tools": [tool["function"]["name"] for tool in package.tools],
            "declared_task_count": dict(package.tasks),
        },
        "task_distribution": {"dataset_version": passport.environment},
        "types": {"tags": ["captrain", "tool-use"]},
        "execution": {
            "kind": "openenv_ws",
            "probe_path": "validation/runtime.json",
            "dockerfile": "server/Dockerfile",
            "context": ".",
            "agent_boundary": "api",
        },
        "passport": grades,
    }
    manifest = {
        "spec_version": 1,
        "name": package.module,
        "version": "0.1.0",
        "type": "space",
        "runtime": "fastapi",
        "app": "server.app:app",
        "port": 8000,
        "validation": validation,
    }
    return yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True)


def _runtime_plan(package: Package) -> JsonObject:
    """Return the episode of OpenEnv's validation: the reference solution of the first training task."""
    actions = [
        {
            "type": "message",
            "content": message.get("content") or "",
            "tool_calls": [
                {"type": "function", "function": call["function"]} for call in message.get("tool_calls") or []
            ],
        }
        for message in package.solution
    ]
    reset = {"episode_id": "captrain-reference", "seed": 0, "options": {"split": "training", "index": 0}}
    return {"plan_schema_version": "1", "reset": reset, "actions": actions}
