"""Merges rows of tokens into prefix trees, so that training computes common prefixes only once.

The rollouts of a group have the same prompt and often start with the same tokens. All rows of a pass may have the same
system prompt. In a causal model, the state of a token depends only on the tokens before it. So one tree node stands for
a token in all rows with the same prefix, and it attends to its ancestors. Losses and gradients equal those of separate
rows, with a fraction of the positions. Nodes are concatenated without padding. Tokens after the last prediction of a
row have no node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

TREE = 4096
"""Approximate limit on the tokens in the rows of one tree, because attention memory grows with their square."""
Row = tuple[Sequence[int], Sequence[int]]
"""Token ids of a row, and 1 where a token is scored."""


class Tree(NamedTuple):
    """Tree of rows with the same prompt: the nodes `start` to `stop`.

    attention: (nodes, nodes), true if the first node attends to the second, which is the node itself or an ancestor.
    None if each node attends to all nodes before it.
    """

    start: int
    stop: int
    attention: Tensor | None


@dataclass(frozen=True)
class Forest:
    """Rows as prefix trees on a common trunk.

    ids: (nodes,), token ids.
    positions: (nodes,), position of the token in its rows: the number of its ancestors, including the trunk.
    trunk: number of leading nodes that are the common prefix of all rows.
    trees: one tree for the rows of each prompt, or several if the rows are long.
    sources: (predictions,), the nodes that predict a scored token, sorted and without duplicates.
    source_indices: (scored,), for each scored token, the index in `sources` of the node that predicts it, row by row.
    targets: (scored,), the scored tokens.
    """

    ids: Tensor
    positions: Tensor
    trunk: int
    trees: tuple[Tree, ...]
    sources: Tensor
    source_indices: Tensor
    targets: Tensor


def make_forest(rows: Sequence[Row]) -> Forest:
    """Merge rows into trees.

    The prompt of a row is everything before its first scored token. The first token of a row is never scored, because
    nothing predicts it.
    """
    prompts = [_prompt(row) for row in rows]
    # The trunk is the common prefix of all prompts. With a single prompt there is no trunk, only a tree.
    distinct = {*prompts}
    columns = zip(*distinct, strict=False) if len(distinct) > 1 else ()
    trunk = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    groups: dict[tuple[tuple[int, ...], int], list[int]] = {}
    lengths: dict[tuple[int, ...], int] = {}
    for number, prompt in enumerate(prompts):
        lengths[prompt] = lengths.get(prompt, 0) + len(rows[number][0])
        groups.setdefault((prompt, lengths[prompt] // TREE), []).append(number)
    ids, positions, trees = [*rows[0][0][:trunk]], [*range(trunk)], list[Tree]()
    nodes = [list[int]() for _ in rows]
    for members in groups.values():
        start = len(ids)
        parents, branches = list[int](), dict[tuple[int, int], int]()
        for number in members:
            parent, path = -1, [*range(trunk)]
            tokens, scored = rows[number]
            # The last scored token and those after it predict nothing.
            end = max((index for index, flag in enumerate(scored) if flag), default=0)
            for token in tokens[trunk:end]:
                node = branches.setdefault((parent, token), len(parents))
                if node == len(parents):
                    parents.append(parent)
                    ids.append(token)
                    positions.append(1 + (positions[start + parent] if parent >= 0 else trunk - 1))
                path.append(start + node)
                parent = node
            nodes[number] = path
        if parents:
            trees.append(Tree(start, len(ids), _attention(parents)))
    pairs = [
        (path[index - 1], token)
        for (tokens, scored), path in zip(rows, nodes, strict=True)
        for index, (token, flag) in enumerate(zip(tokens, scored, strict=True))
        if flag and index
    ]
    sources, source_indices = torch.tensor([node for node, _ in pairs], dtype=torch.long).unique(return_inverse=True)
    targets = torch.tensor([token for _, token in pairs], dtype=torch.long)
    return Forest(
        torch.tensor(ids, dtype=torch.long),
        torch.tensor(positions, dtype=torch.long),
        trunk,
        tuple(trees),
        sources,
        source_indices,
        targets,
    )


def _prompt(row: Row) -> tuple[int, ...]:
    ids, scored = row
    return tuple(ids[: next((i for i, flag in enumerate(scored) if flag), len(ids))])


def _attention(parents: Sequence[int]) -> Tensor | None:
    if all(parent == node - 1 for node, parent in enumerate(parents)):
        return None
    attention = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            attention[node] |= attention[parent]
    return attention


def split_forest(rows: Sequence[Row], parts: int) -> list[list[int]]:
    """Divide rows into parts with similar numbers of tokens. Rows with the same prompt stay together.

    Returns:
        For each part, the sorted indices of its rows. A part may be empty.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(_prompt(row), []).append(number)
    shares, loads = [list[int]() for _ in range(parts)], [0] * parts
    for members in sorted(groups.values(), key=lambda members: -sum(len(rows[number][0]) for number in members)):
        least = loads.index(min(loads))
        shares[least] += members
        loads[least] += sum(len(rows[number][0]) for number in members)
    return [sorted(share) for share in shares]
