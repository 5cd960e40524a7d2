"""One adapter made of several: by arithmetic on their updates D_c = (alpha / r) B_c A_c, or by distillation.

What arithmetic makes of each module, for n adapters of rank r:

- `sum`: D_1 + ... + D_n, exactly (task arithmetic with factor 1, arXiv 2212.04089).
- `mean`: the same divided by n, exactly.
- `svd`: the best approximation of the sum that has the rank of a single adapter.
- `ties`: of each D_c the largest `density` of its weights; then at each place the sign that has more mass, and the
  mean of the weights of that sign (arXiv 2306.01708, with factor 1, trimmed in each module by itself).
- `dare`: of each D_c a random `density` of its weights, divided by `density`, and the mean of all: its expectation is
  `mean` (arXiv 2311.03099).
- `core`: as `ties`, but on the cores M_c = U' D_c V, where U and V are orthonormal bases of the columns of all B_c and
  of the rows of all A_c; then U M V'. The projection loses nothing (Core Space, arXiv 2509.17786, section 3).

PEFT's own linear, ties and dare merge the factors A and B one by one, which is another function: the product of merged
factors has cross terms. Here PEFT's rules are applied to the updates. `ties` and `dare` leave full rank: they are cut
to n r, the rank of the sum, and the model card says how much that keeps. All others lose nothing, and every adapter has
the least rank that it can.
"""

import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from captrain.config import Spec
from captrain.errors import UserError
from captrain.execution import run
from captrain.models import Adapter, adapter_digest, lora_factors, save_lora_factors
from captrain.records import digest, publish, publish_json, publish_text
from captrain.training.distillation import distil, distillation
from captrain.training.jobs import Trained

WORKSPACES = Path(".cache/merging")
NEGLIGIBLE = 1e-6
"""Singular values below this share of the largest are rounding errors of float32."""
COLUMNS = ("adapter", "step", "rollouts", "reward", "success", "divergence")


def merge_all(spec: Spec, base: Path, results: Path) -> list[Trained]:
    """TRACE's adapters merged by every method of the configuration, in its order; none where there are no adapters.

    Raises:
        UserError: an adapter or an environment is missing, or not the one that its index or passport names.
    """
    members = _members(results / "adapters/index.json") if spec.merging.methods else {}
    made = []
    for method in spec.merging.methods if members else ():
        if method == "distillation":
            job = distillation(spec, base, results / "environments", members)
            made += run(distil, [job], spec.machine, method)
        else:
            made.append(merge(method, members, density=spec.merging.density, seed=spec.seed))
    return made


def _members(path: Path) -> dict[str, Adapter]:
    members = {name: Adapter(row["path"], row["digest"]) for name, row in json.loads(path.read_text()).items()}
    for name, member in members.items():
        if adapter_digest(Path(member.folder)) != member.digest:
            raise UserError(
                f"adapter {name} in {member.folder} is not {member.digest}, which was trained",
                "it was altered: run `dvc repro -f adapters`",
            )
    return members


def publish_merged(made: Sequence[Trained]) -> None:
    """Copy adapters to artifacts/merging/<digest>, and write results/merging: index, ledger of what was sampled,
    history of what was trained."""
    index, results, artifacts = {}, Path("results/merging"), Path("artifacts/merging")
    artifacts.mkdir(parents=True, exist_ok=True)
    for one in made:
        folder = artifacts / one.digest
        shutil.copytree(one.folder, folder, dirs_exist_ok=True)
        counts = {"rollouts": one.rollouts, "discarded": one.discarded}
        index[one.name] = {"digest": one.digest, "path": str(folder), "guidance": [], **counts}
    rows = [COLUMNS, *([one.name, *(step[key] for key in COLUMNS[1:])] for one in made for step in one.history)]
    publish_text(results / "history.csv", "".join(",".join(map(str, row)) + "\n" for row in rows))
    publish(results / "ledger.jsonl", [one.ledger("merging", one.name) for one in made if one.rollouts])
    publish_json(results / "index.json", index)


def merge(method: str, members: Mapping[str, Adapter], *, density: float, seed: int) -> Trained:
    """Merge adapters by arithmetic.

    Args:
        method: `sum`, `mean`, `svd`, `ties`, `dare` or `core`.
        members: adapters by name, of one base.
        density: share of the weights that `ties`, `core` and `dare` keep.
        seed: run seed; `dare` draws by it.

    Returns:
        The adapter, which cost no rollout; its folder is named by its content.

    Raises:
        UserError: a member is missing, damaged, or no plain LoRA adapter, or members do not go together.
    """
    import torch

    torch.set_num_threads(1)
    names = sorted(members)
    factors = [lora_factors(members[name]) for name in names]
    if any(one.keys() != factors[0].keys() for one in factors):
        raise UserError("adapters change different modules and cannot be merged", "use adapters of one trainer")
    merged, whole, kept = {}, 0.0, 0.0
    for module in factors[0]:
        parts = [(up.double(), down.double()) for up, down in (one[module] for one in factors)]
        ranks = [len(down) for _, down in parts]
        up, down = _merged(method, parts, density, digest("dare", seed, module))
        merged[module], everything, remaining = _reduced(up, down, max(ranks) if method == "svd" else sum(ranks))
        whole, kept = whole + everything, kept + remaining
    aside = WORKSPACES / f".{method}.{os.getpid()}.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    save_lora_factors(aside, members[names[0]], merged)
    content = adapter_digest(aside)
    rank = max(len(down) for _, down in merged.values())
    publish_text(
        aside / "README.md", _card(method, members, content, rank, kept / whole if whole else 1.0, density, seed)
    )
    folder = WORKSPACES / method / content
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    return Trained(method, content, folder, 0, 0, 0, 0, 0, [])


def _merged(method: str, parts: Sequence[tuple[Any, Any]], density: float, key: str) -> tuple[Any, Any]:
    """Factors (out, k) and (k, in) of what a method makes of one module; see the top of this module."""
    import torch
    from peft.utils import merge_utils

    up, down = torch.cat([up for up, _ in parts], 1), torch.cat([down for _, down in parts])
    ones = torch.ones(len(parts), dtype=up.dtype)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", "The density")  # of 1, which prunes nothing, as asked for
        torch.manual_seed(int(key, 16) % 2**63)
        match method:
            case "sum" | "svd":
                return up, down
            case "mean":
                return up / len(parts), down
            case "core":
                left, right = _basis(up), _basis(down.T)
                cores = [(left.T @ up) @ (down @ right) for up, down in parts]
                return left @ merge_utils.ties(cores, ones, density), right.T
        deltas = [up @ down for up, down in parts]
        rules = {"ties": merge_utils.ties, "dare": merge_utils.dare_linear}
        weights = ones / len(parts) if method == "dare" else ones
        return rules[method](deltas, weights, density), torch.eye(down.shape[1], dtype=down.dtype)


def _basis(stacked: Any) -> Any:
    """An orthonormal basis (size, rank) of the columns, in the order of their singular values."""
    import torch

    left, values, _ = torch.linalg.svd(stacked, full_matrices=False)
    return left[:, values > NEGLIGIBLE * values[0]]


def _reduced(up: Any, down: Any, rank: int) -> tuple[tuple[Any, Any], float, float]:
    """The product of two factors in factors of the least rank, at most `rank`, by QR and SVD; and the squared norm of
    the product and of what is kept of it."""
    import torch

    (left, upper), (right, lower) = torch.linalg.qr(up), torch.linalg.qr(down.T)
    u, values, v = torch.linalg.svd(upper @ lower.T, full_matrices=False)
    count = min(rank, int((values > NEGLIGIBLE * values[0]).sum()))
    roots = values[:count].sqrt()
    factors = (left @ (u[:, :count] * roots), (roots[:, None] * v[:count]) @ right.T)
    return factors, values.square().sum().item(), values[:count].square().sum().item()


def _card(
    method: str, members: Mapping[str, Adapter], content: str, rank: int, kept: float, density: float, seed: int
) -> str:  # fmt: skip
    """A model card in Markdown, from results only."""
    rows = {"content hash": content, **{f"member `{name}`": members[name].digest for name in sorted(members)}}
    rows |= {"rank": rank}
    rows["share of the squared norm of the merged update that this rank keeps"] = f"{kept:.4f}"
    rows |= {"density": density} if method in ("ties", "dare", "core") else {}
    rows |= {"seed": seed} if method == "dare" else {}
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
library_name: peft
base_model: captrain-base
tags: [captrain, merging, lora]
---
# {method}

LoRA adapter merged from {len(members)} others by `{method}`, without a rollout (see `captrain.training.merging`).

| | |
|---|---|
{table}

Use it with the base of its members only: W' = W + (alpha / rank) B A.
"""
