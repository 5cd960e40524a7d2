"""Router by sets of capabilities: one logistic regression per capability, on words and word pairs.

Nearest examples have one capability each, so a task that needs two is near to neither. Here each capability has its own
probability, and so has "none". They are learnt from openings of the environments of single capabilities and of pairs,
and of discovery tasks that the base passed, which need none. Without pairs, words of one capability count against every
other, and few sets of two are found (see `captrain.environments.synthesis`).

Features are present or absent; counts of clauses or of record ids did not help. Classes are weighted to equal totals,
because the number of openings of an environment does not show how often it is needed.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from captrain.routing.compositions import BASE, members, route_of
from captrain.routing.router import AskedModel, Example

WORD = re.compile(r"[A-Za-z][A-Za-z'-]+")
SURE = 20.0
"""Absolute log-odds of a capability that all examples need (positive) or none needs (negative)."""
DIGITS = 6
"""Decimals of the weights, so that rounding errors of the solver do not decide a route."""


def words(text: str) -> list[str]:
    """Return words and pairs of neighbouring words, in lower case. Numbers are ignored, because they name records."""
    single = [word.lower() for word in WORD.findall(text)]
    return single + [f"{first} {second}" for first, second in zip(single, single[1:], strict=False)]


class SetRouter:
    """Router that chooses all capabilities that are more likely needed than not, each adapter at weight 1.

    Args:
        most: most adapters that act together.
        gate: leave out adapters without gain in their own environment.
    """

    def __init__(
        self, model: AskedModel | None = None, *, most: Annotated[int, Field(ge=1, le=3)] = 2, gate: bool = True
    ) -> None:
        self.most, self.gate = most, gate

    def route(self, examples: Sequence[Example], openings: Sequence[str]) -> list[str]:
        """See `Router.route`; deterministic."""
        from sklearn.feature_extraction.text import CountVectorizer
        from sklearn.linear_model import LogisticRegression

        if not examples:
            return [BASE] * len(openings)
        labels = [members(example.route) or {BASE} for example in examples]
        analyzer: Any = words
        vectorizer: Any = CountVectorizer(analyzer=analyzer, binary=True)
        matrix = vectorizer.fit_transform([example.text for example in examples])
        # The log-odds of needing each capability, and of needing none, have a bias and a weight for each word.
        bias, weights = dict[str, float](), dict[str, list[float]]()
        for name in [BASE, *sorted(set[str]().union(*labels) - {BASE})]:
            answers = [name in capabilities for capabilities in labels]
            bias[name], weights[name] = SURE if answers[0] else -SURE, [0.0] * matrix.shape[1]
            if len(set(answers)) > 1:
                model = LogisticRegression(class_weight="balanced", max_iter=2000).fit(matrix, answers)
                bias[name] = round(float(model.intercept_[0]), DIGITS)
                weights[name] = [round(float(weight), DIGITS) for weight in model.coef_[0]]
        routes = []
        for text in openings:
            places = vectorizer.transform([text]).indices
            odds = {name: math.fsum([bias[name], *(weights[name][place] for place in places)]) for name in bias}
            routes.append(self.likeliest({name: 1 / (1 + math.exp(-odd)) for name, odd in odds.items()}))
        return routes

    def likeliest(self, probabilities: Mapping[str, float]) -> str:
        """Return the route of the capabilities with a probability above 0.5, at most the `most` likeliest.

        If there are none, return the likeliest capability, or the base if its probability is above 0.5.
        """
        chances = {name: round(value, 9) for name, value in probabilities.items()}
        chance_of_base = chances.pop(BASE)
        ranking = sorted(chances, key=lambda name: (-chances[name], name))
        likely = [name for name in ranking if chances[name] > 0.5]
        return route_of(frozenset(likely[: self.most] or (ranking[:1] if chance_of_base <= 0.5 else [])))
