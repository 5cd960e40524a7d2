"""Router by sets of capabilities: one logistic regression per capability, on words and pairs of words.

Nearest examples answer with one capability each; a task that needs two is near to neither. Here each capability has a
probability of its own, learnt from openings of the environments of single capabilities, of pairs where there are any,
and of discovery tasks that the base passed, which need none: that, too, has a probability. Without pairs, words of one
capability are evidence against every other, and few sets of two are found: see `captrain.environments.synthesis`.

Features are present or absent; counts of clauses or of record ids were tried and found nothing more. Classes are
weighted to equal totals: how many openings an environment gives says nothing of how often it is needed.
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
"""Log-odds of a capability that all examples need, or none."""
DIGITS = 6
"""Decimals of the weights: what the last bits of a solver are must decide no route."""


def words(text: str) -> list[str]:
    """Split a text into words and pairs of neighbouring words, in lower case; numbers are left out: they name, they do
    not ask."""
    single = [word.lower() for word in WORD.findall(text)]
    return single + [f"{first} {second}" for first, second in zip(single, single[1:], strict=False)]


class SetModel:
    """Log-odds of needing each capability, and of needing none ("base"), linear in which features are there.

    Args:
        bias: capability, or "base", -> log-odds without any known feature.
        weights: feature -> what it adds to each of the log-odds, in the order of `bias`.
    """

    def __init__(self, bias: Mapping[str, float], weights: Mapping[str, Sequence[float]]) -> None:
        self.bias, self.weights = dict(bias), {name: tuple(row) for name, row in weights.items()}

    @classmethod
    def fit(cls, examples: Sequence[tuple[Sequence[str], frozenset[str]]]) -> "SetModel":
        """Fit to (features, the capabilities needed); deterministic."""
        from sklearn.feature_extraction.text import CountVectorizer
        from sklearn.linear_model import LogisticRegression

        labels = [capabilities or {BASE} for _, capabilities in examples]
        analyzer: Any = list
        vectorizer = CountVectorizer(analyzer=analyzer, binary=True)
        matrix: Any = vectorizer.fit_transform([features for features, _ in examples])
        bias, columns = dict[str, float](), []
        for name in [BASE, *sorted(set[str]().union(*labels) - {BASE})]:
            answers = [name in capabilities for capabilities in labels]
            if len(set(answers)) == 1:
                bias[name] = SURE if answers[0] else -SURE
                columns.append([0.0] * matrix.shape[1])
                continue
            model = LogisticRegression(class_weight="balanced", max_iter=2000).fit(matrix, answers)
            bias[name] = round(float(model.intercept_[0]), DIGITS)
            columns.append([round(float(weight), DIGITS) for weight in model.coef_[0]])
        features = [str(feature) for feature in vectorizer.get_feature_names_out()]
        return cls(bias, dict(zip(features, zip(*columns, strict=True), strict=True)))

    def probabilities(self, features: Sequence[str]) -> dict[str, float]:
        """Estimate the probability that each capability is needed, and that none is."""
        rows = [self.weights[feature] for feature in sorted(set(features)) if feature in self.weights]
        odds = [math.fsum([bias, *(row[index] for row in rows)]) for index, bias in enumerate(self.bias.values())]
        return {name: 1 / (1 + math.exp(-odd)) for name, odd in zip(self.bias, odds, strict=True)}

    def route(self, features: Sequence[str], most: int) -> str:
        """Choose the route of the capabilities that are needed more likely than not, the `most` likeliest of them.

        Where there is none, and it is not likely either that none is needed, the likeliest.
        """
        chances = {name: round(value, 9) for name, value in self.probabilities(features).items()}
        chance_of_base = chances.pop(BASE)
        ranking = sorted(chances, key=lambda name: (-chances[name], name))
        likely = [name for name in ranking if chances[name] > 0.5]
        return route_of(frozenset(likely[:most] or (ranking[:1] if chance_of_base <= 0.5 else [])))


class SetRouter:
    """Every capability that is needed more likely than not, their adapters at weight 1 each.

    Args:
        most: at most so many adapters act together.
        gate: whether adapters that have gained nothing are left out.
    """

    def __init__(
        self, model: AskedModel | None = None, *, most: Annotated[int, Field(ge=1, le=3)] = 2, gate: bool = True
    ) -> None:
        self.most, self.gate = most, gate

    def route(self, examples: Sequence[Example], openings: Sequence[str]) -> list[str]:
        """See `Router.route`."""
        if not examples:
            return [BASE] * len(openings)
        model = SetModel.fit([(words(example.text), members(example.route)) for example in examples])
        return [model.route(words(text), self.most) for text in openings]
