"""Rows of tokens as trees, for training: what rows have in common from their beginning on is computed once.

The rollouts of a group read one prompt and often write the same tokens for a while, as the engine knows, too
(`captrain.policies.engine`). In a causal model a token's state depends on the tokens before it alone: one node of a
tree stands for that token in every row that begins so, and attends to its ancestors. Losses and gradients are those of
the rows one by one, at a fraction of the positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
"""The label of a token that is not scored."""


@dataclass(frozen=True)
class Forest:
    """Rows as trees, one tree for all rows of a prompt.

    ids: (trees, nodes), zeros behind the last.
    positions: (trees, nodes), the number of ancestors.
    attention: (trees, 1, nodes, nodes), whether a node (third) attends to another (fourth): to itself and ancestors.
    nodes: (rows, tokens), the node of each token, numbered through all trees; 0 for padding.
    """

    ids: Tensor
    positions: Tensor
    attention: Tensor
    nodes: Tensor


def make_forest(ids: Tensor, mask: Tensor, labels: Tensor) -> Forest:
    """Trees of padded rows, on the device of these.

    Args:
        ids: (rows, tokens).
        mask: (rows, tokens), 0 for padding.
        labels: (rows, tokens); what stands before the first scored token is a row's prompt.
    """
    trees: dict[tuple[int, ...], dict[tuple[int, int], int]] = {}
    scored = labels != IGNORED
    places: list[tuple[int, list[int], list[int]]] = []
    for row, real, scores in zip(ids.tolist(), mask.bool().tolist(), scored.tolist(), strict=True):
        columns = [column for column, token in enumerate(real) if token]
        first = scores.index(True) if any(scores) else len(row)
        prompt = tuple(row[column] for column in columns if column < first)
        tree = trees.setdefault(prompt, {})
        parent, path = -1, list[int]()
        for column in columns:
            parent = tree.setdefault((parent, row[column]), len(tree))
            path.append(parent)
        places.append(([*trees].index(prompt), columns, path))
    size = max(map(len, trees.values()))
    forest = Forest(
        ids=torch.zeros((len(trees), size), dtype=torch.long),
        positions=torch.zeros((len(trees), size), dtype=torch.long),
        attention=torch.eye(size, dtype=torch.bool).repeat(len(trees), 1, 1, 1),
        nodes=torch.zeros(ids.shape, dtype=torch.long),
    )
    for number, tree in enumerate(trees.values()):
        attention, positions = forest.attention[number, 0], [0] * size
        forest.ids[number, : len(tree)] = torch.tensor([token for _, token in tree])
        for node, (parent, _) in enumerate(tree):
            if parent >= 0:
                attention[node] |= attention[parent]
                positions[node] = positions[parent] + 1
        forest.positions[number] = torch.tensor(positions)
    for row, (number, columns, path) in enumerate(places):
        forest.nodes[row, columns] = torch.tensor(path) + number * size
    return Forest(*(tensor.to(ids.device) for tensor in (forest.ids, forest.positions, forest.attention, forest.nodes)))
