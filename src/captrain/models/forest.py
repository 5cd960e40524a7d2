"""Rows of tokens as trees, for training: what rows have in common from their beginning on is computed once.

The rollouts of a group read one prompt and often write the same tokens for a while, as the engine knows, too
(`captrain.agents.engine`), and all rows of a pass may begin with the same system prompt. In a causal model a token's
state depends on the tokens before it alone: one node of a tree stands for that token in every row that begins so, and
attends to its ancestors. Losses and gradients are those of the rows one by one, at a fraction of the positions; nodes
lie one behind another, without padding. Tokens from which nothing is predicted that is scored have no node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

TREE = 4096
"""Tokens of the rows of one tree, about at most: attention takes memory by their square."""
Row = tuple[Sequence[int], Sequence[int]]
"""Token ids of a row, and 1 where a token is scored."""


class Tree(NamedTuple):
    """Rows with one prompt: nodes start to stop; attention: (nodes, nodes), whether a node (first) attends to another
    (second), to itself and its ancestors; None where each node attends to all before it."""

    start: int
    stop: int
    attention: Tensor | None


@dataclass(frozen=True)
class Forest:
    """Rows as trees on a common trunk.

    ids: (nodes,), token ids.
    positions: (nodes,), the number of ancestors, those of the trunk included.
    trunk: the first so many nodes are what all rows begin with.
    trees: one for all rows of a prompt, or of some of them, where they are long.
    sources: (predictions,), nodes that a scored token follows, in order and each once.
    places: (scored,), which of the predictions each scored token of each row is read from, row by row.
    targets: (scored,), these tokens.
    """

    ids: Tensor
    positions: Tensor
    trunk: int
    trees: tuple[Tree, ...]
    sources: Tensor
    places: Tensor
    targets: Tensor


def make_forest(rows: Sequence[Row]) -> Forest:
    """Merge rows into trees; what stands before the first scored token of a row is its prompt.

    A row's first token is never scored: nothing predicts it.
    """
    prompts = [_prompt(row) for row in rows]
    # What all prompts begin with; nothing where there is one prompt, which is a tree by itself.
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
            # Nothing is read from the last scored token and what follows it.
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
    sources, places = torch.tensor([node for node, _ in pairs], dtype=torch.long).unique(return_inverse=True)
    targets = torch.tensor([token for _, token in pairs], dtype=torch.long)
    return Forest(
        torch.tensor(ids, dtype=torch.long),
        torch.tensor(positions, dtype=torch.long),
        trunk,
        tuple(trees),
        sources,
        places,
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
    """Share rows out to processes: rows of a prompt stay together, and tokens are shared evenly.

    Returns:
        The numbers of the rows of each part, ascending; a part may be empty.
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
