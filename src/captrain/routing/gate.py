"""Router by a trained gate: it weighs the adapters and the base for each task, from its opening.

The gate is a multinomial logistic regression of the route on an embedding of the opening. Like every router, it learns
from openings of the environments (training split) and of discovery tasks that the base passed. It sees no test task and
no outcome of an adapter. The probability of a route is the weight of its adapter; the base's share has no effect. So a
task that needs no adapter gets none, and a task between two environments gets half of each adapter. The opening of a
pair counts half for each capability.

The embedding is TF-IDF over words, or the mean of the base's hidden states after the last layer over the opening's
tokens. The latter needs a base in this process and one forward pass per task.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from captrain.models import composition_name, normalised_weights
from captrain.routing.compositions import BASE, members
from captrain.routing.router import AskedModel, Example
from captrain.routing.sets import words

DIGITS = 6
"""Decimals of states and weights, so that rounding errors of the solver do not decide a route."""


class GateRouter:
    """Router that combines adapters with the weights of a trained gate, in tenths.

    Args:
        model: the base, whose `states` are read.
        embedding: what the gate reads: words of the opening, or hidden states of the base.
        floor: adapters with less weight are dropped, and the others share their weight.
        gate: leave out adapters without gain in their own environment.
    """

    def __init__(
        self,
        model: AskedModel,
        *,
        embedding: Literal["words", "states"] = "words",
        floor: Annotated[float, Field(ge=0, lt=0.5)] = 0.2,
        gate: bool = True,
    ) -> None:
        self.model, self.embedding, self.floor, self.gate = model, embedding, floor, gate

    def route(self, examples: Sequence[Example], openings: Sequence[str]) -> list[str]:
        """See `Router.route`."""
        return [self.composed(weights) for weights in self.weights(examples, openings)]

    def weights(self, examples: Sequence[Example], openings: Sequence[str]) -> list[dict[str, float]]:
        """Return the weight of each adapter and of the base for each opening. Weights sum to 1, up to rounding."""
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import StandardScaler

        # An example of several adapters counts as one of each, with its weight divided.
        shares = [
            (row, name, 1 / max(1, len(members(example.route))))
            for row, example in enumerate(examples)
            for name in sorted(members(example.route)) or [BASE]
        ]
        names = sorted({name for _, name, _ in shares})
        if len(names) < 2:
            return [dict.fromkeys(names or [BASE], 1.0)] * len(openings)
        # Fit the embedding on the examples only.
        count, texts = len(examples), [*(example.text for example in examples), *openings]
        if self.embedding == "words":
            analyzer: Any = words
            vectorizer: Any = TfidfVectorizer(analyzer=analyzer, sublinear_tf=True).fit(texts[:count])
            matrix: Any = vectorizer.transform(texts)
        else:
            states = mean_states(self.model.folder, texts)
            matrix = StandardScaler().fit(states[:count]).transform(states)
        rows, targets, shared = zip(*shares, strict=True)
        model = LogisticRegression(class_weight="balanced", max_iter=2000)
        model.fit(matrix[list(rows)], list(targets), sample_weight=list(shared))
        chances = np.asarray(model.predict_proba(matrix[count:]))
        columns = [str(name) for name in model.classes_]
        return [dict(zip(columns, [round(float(chance), DIGITS) for chance in row], strict=True)) for row in chances]

    def composed(self, weights: Mapping[str, float]) -> str:
        """Return the route for weights: small weights and the base's are dropped, and the rest is rounded to tenths."""
        heavy = {name: weight for name, weight in weights.items() if weight >= self.floor}
        tenths = normalised_weights(heavy or {max(weights, key=lambda name: weights[name]): 1.0})
        adapters = {name: weight for name, weight in tenths.items() if name != BASE}
        return composition_name(adapters) if adapters else BASE


def mean_states(model: Path, texts: Sequence[str]) -> NDArray[np.float64]:
    """Average the base's hidden states after its last layer over the tokens of each text, read as a user's first
    message.

    Args:
        model: folder of the base model.
        texts: openings.

    Returns:
        (texts, hidden), float64.
    """
    import torch

    from captrain.agents import LocalPolicy
    from captrain.models import load_module

    policy = LocalPolicy(model, temperature=1.0, max_turns=1, max_tokens=1)
    chat, module = policy.chat([]), load_module(model, "float64").eval()
    rows = []
    with torch.no_grad():
        for text in texts:
            prompt = chat.prompt([{"role": "user", "content": text}])[-policy.max_length :]
            states = module(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
            rows.append(states.mean(0).numpy())
    return np.array(rows, dtype=np.float64).round(DIGITS)
