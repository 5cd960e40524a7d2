"""Merges several adapters into one: by arithmetic on their updates D_c = (alpha / r) B_c A_c, or by distillation.

The methods of arithmetic, module by module, for n adapters of rank r:

- `sum`: D_1 + ... + D_n, exactly (task arithmetic with factor 1, arXiv 2212.04089).
- `mean`: the sum divided by n, exactly.
- `svd`: the best approximation of the sum with the rank of a single adapter.
- `ties`: keep the largest `density` of the weights of each D_c; then at each place take the sign with more mass, and
  average the weights of that sign (arXiv 2306.01708, with factor 1, trimmed in each module separately).
- `dare`: keep a random `density` of the weights of each D_c, divided by `density`, and average all; the expectation is
  `mean` (arXiv 2311.03099).
- `core`: `ties` on the cores M_c = U' D_c V, where U and V are orthonormal bases of the columns of all B_c and of the
  rows of all A_c; then U M V'. The projection is exact (Core Space, arXiv 2509.17786, section 3).

PEFT's own linear, ties and dare merge the factors A and B separately, so that their product has cross terms. Here its
rules are applied to the updates. `ties` and `dare` give full rank and are cut to n r, the rank of the sum; the model
card says how much that keeps. The other methods are exact, and every adapter has the least possible rank.
"""

import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from captrain.errors import UserError
from captrain.models import Adapter, adapter_digest, lora_factors, require_trained, save_lora_factors
from captrain.records import digest, publish_text, read_index
from captrain.run import Spec, code_digest, prepare_torch, run
from captrain.training.jobs import Distillation, Result, Trained, training_environments
from captrain.training.recipe import derived_trainer
from captrain.training.runs import train
from captrain.training.workspace import replace_folder, train_once

if TYPE_CHECKING:
    from torch import Tensor

    LowRank = tuple[Tensor, Tensor]

WORKSPACES = Path(".cache/merging")
NEGLIGIBLE = 1e-6
"""Singular values below this share of the largest are float32 rounding errors."""
MERGING_COLUMNS = ("adapter", "step", "rollouts", "reward", "success", "divergence")
"""Columns of history.csv (see `captrain.training.workspace.publish_adapters`)."""

CARD = """---
library_name: peft
base_model: captrain-base
tags: [captrain, merging, lora]
---
# {method}

LoRA adapter merged from {count} others by `{method}`, without a rollout (see `captrain.training.merging`).

| | |
|---|---|
{table}

Use it with the base of its members only: W' = W + (alpha / rank) B A.
"""


def merge_all(spec: Spec, base: Path, results: Path) -> list[Trained]:
    """Merge TRACE's adapters by every configured method, in order; return nothing if there are no adapters.

    Raises:
        UserError: an adapter or an environment is missing, or differs from its index or passport.
    """
    path = results / "adapters/index.json"
    index = read_index(path) if spec.merging.methods else {}
    members = {name: require_trained(Adapter(row.path, row.digest)) for name, row in index.items()}
    adapters: list[Trained] = []
    for method in spec.merging.methods:
        if not members:
            break
        if method == "distillation":
            adapters += run(train, [distillation(spec, base, results / "environments", members)], spec.machine, method)
        else:
            adapters.append(merge(method, members, density=spec.merging.density, seed=spec.seed))
    return adapters


def distillation(spec: Spec, base: Path, environments: Path, teachers: Mapping[str, Adapter]) -> Distillation:
    """Plan the student of all adapters. An adapter and its environment have the same name.

    Raises:
        UserError: an adapter's environment has no passport.
    """
    by_name = {environment.name: environment for environment in training_environments(environments)}
    if missing := [name for name in teachers if name not in by_name]:
        raise UserError(
            f"adapter {missing[0]} has no environment in {environments} to be imitated in",
            "run `dvc repro environments adapters`, or leave distillation out of merging.methods",
        )
    return Distillation(
        name="distillation",
        base=base,
        policy=spec.exploring(),
        trainer=derived_trainer(
            spec.trainer,
            learning_rate=spec.merging.learning_rate,
            schedule="constant",
            loss="dapo",
            importance_cap=None,
            hints=0.0,
        ),
        environments=tuple(by_name[name] for name in teachers),
        rollouts=spec.merging.rollouts,
        seed=spec.seed,
        machine=spec.machine,
        teachers=tuple(teachers.values()),
    )


def merge(method: str, members: Mapping[str, Adapter], *, density: float, seed: int) -> Trained:
    """Merge adapters by arithmetic, without a rollout, and cache the result in its workspace.

    Args:
        method: `sum`, `mean`, `svd`, `ties`, `dare` or `core`.
        members: adapters by name, of one base.
        density: share of the weights that `ties`, `core` and `dare` keep.
        seed: run seed, for `dare`.

    Raises:
        UserError: a member is missing, damaged or not plain LoRA, or members change different modules.
    """
    members = {name: members[name] for name in sorted(members)}
    # Read the members even if the result is cached, to refuse an altered one.
    digests = [(name, adapter_digest(Path(member.folder))) for name, member in members.items()]
    folder = WORKSPACES / digest(code_digest(merge), method, digests, density, seed)
    adapter, aside = folder / "adapter", folder / "unfinished"

    def merged() -> Result:
        share, rank = _save(method, members, density, seed, aside)
        content = adapter_digest(aside)
        rows: dict[str, object] = {"content hash": content}
        rows |= {f"member `{name}`": member.digest for name, member in members.items()}
        rows["rank"] = rank
        rows["share of the squared norm of the merged update that this rank keeps"] = f"{share:.4f}"
        rows |= {"density": density} if method in ("ties", "dare", "core") else {}
        rows |= {"seed": seed} if method == "dare" else {}
        table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
        publish_text(aside / "README.md", CARD.format(method=method, count=len(members), table=table))
        replace_folder(aside, adapter)
        return Result(content)

    return Trained(method, train_once(folder, method, Result, merged).digest, adapter)


def _save(method: str, members: Mapping[str, Adapter], density: float, seed: int, folder: Path) -> tuple[float, int]:
    """Write the merged adapter to a folder; return the share of the squared norm that its rank keeps, and the rank."""
    prepare_torch()
    factors = [lora_factors(member) for member in members.values()]
    if any(factor.keys() != factors[0].keys() for factor in factors):
        raise UserError("adapters change different modules and cannot be merged", "use adapters of one trainer")
    merged, total, remaining = {}, 0.0, 0.0
    for module in factors[0]:
        parts = [(up.double(), down.double()) for up, down in (factor[module] for factor in factors)]
        ranks = [len(down) for _, down in parts]
        up, down = _merged(method, parts, density, digest("dare", seed, module))
        merged[module], norm, reduced_norm = _reduced(up, down, max(ranks) if method == "svd" else sum(ranks))
        total, remaining = total + norm, remaining + reduced_norm
    shutil.rmtree(folder, ignore_errors=True)
    save_lora_factors(folder, next(iter(members.values())), merged)
    return remaining / total if total else 1.0, max(len(down) for _, down in merged.values())


def _merged(method: str, parts: Sequence["LowRank"], density: float, key: str) -> "LowRank":
    """Merge one module by a method (see the top of this file) into factors (out, k) and (k, in)."""
    import torch
    from peft.utils import merge_utils

    up, down = torch.cat([up for up, _ in parts], 1), torch.cat([down for _, down in parts])
    units = torch.ones(len(parts), dtype=up.dtype)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", "The density")  # a density of 1 prunes nothing, as intended
        torch.manual_seed(int(key, 16) % 2**63)
        match method:
            case "sum" | "svd":
                return up, down
            case "mean":
                return up / len(parts), down
            case "core":
                columns, rows = _basis(up), _basis(down.T)
                cores = [(columns.T @ up) @ (down @ rows) for up, down in parts]
                return columns @ merge_utils.ties(cores, units, density), rows.T
        deltas = [up @ down for up, down in parts]
        rules = {"ties": merge_utils.ties, "dare": merge_utils.dare_linear}
        weights = units / len(parts) if method == "dare" else units
        return rules[method](deltas, weights, density), torch.eye(down.shape[1], dtype=down.dtype)


def _basis(stacked: "Tensor") -> "Tensor":
    """Compute an orthonormal basis (size, rank) of the columns, by descending singular value."""
    import torch

    vectors, values, _ = torch.linalg.svd(stacked, full_matrices=False)
    return vectors[:, values > NEGLIGIBLE * values[0]]


def _reduced(up: "Tensor", down: "Tensor", rank: int) -> tuple["LowRank", float, float]:
    """Reduce a product of factors to the least rank, at most `rank`, by QR and SVD, rounded to the grid of trained
    weights. Return the new factors, the squared norm of the product, and that of the new product."""
    import torch

    from captrain.models import to_grid

    (columns, upper), (rows, lower) = torch.linalg.qr(up), torch.linalg.qr(down.T)
    u, values, v = torch.linalg.svd(upper @ lower.T, full_matrices=False)
    count = min(rank, int((values > NEGLIGIBLE * values[0]).sum()))
    roots = values[:count].sqrt()
    factors = (columns @ (u[:, :count] * roots), (roots[:, None] * v[:count]) @ rows.T)
    for factor in factors:
        to_grid(factor)
    return factors, values.square().sum().item(), values[:count].square().sum().item()
