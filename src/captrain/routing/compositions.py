"""Routes of several capabilities: which adapters act on a route, and the route of a set or of shares.

A route is the name of an arm: "base", a capability, or a composition of capabilities as `captrain.models` names them:
"a+b" for the sum of two adapters, "0.6*a+0.4*b" for a weighted one.
"""

from collections.abc import Iterable, Mapping

from captrain.models import composition_name, normalised_weights, parse_composition

BASE = "base"
"""The route on which no adapter acts."""


def members(route: str) -> frozenset[str]:
    """Return the capabilities whose adapters act on a route; none for the base."""
    return frozenset() if route == BASE else frozenset(parse_composition(route))


def route_of(capabilities: frozenset[str]) -> str:
    """Name the route on which the adapters of these capabilities act, each at weight 1."""
    return composition_name(dict.fromkeys(sorted(capabilities), 1.0)) if capabilities else BASE


def route_of_shares(shares: Mapping[str, float], p: float | None) -> str:
    """Choose the route of an opening from the share of each route.

    Without `p`, or if the base leads, choose the largest share. Otherwise compose the largest shares that together
    reach `p`.

    The base's share is left out of a composition; the other shares are renormalised, in tenths.
    """
    ranking = sorted(shares, key=lambda route: -round(shares[route], 9))
    if p is None or ranking[0] == BASE:
        return ranking[0]
    candidates = [route for route in ranking if route != BASE]
    total, mass, composed = sum(shares[route] for route in candidates), 0.0, list[str]()
    while mass < p * total - 1e-9:
        composed.append(candidates[len(composed)])
        mass += shares[composed[-1]]
    return composition_name(normalised_weights({route: shares[route] for route in composed}))


def composition_weights(routes: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return route -> weight of each capability, for compositions and for adapters at a weight other than 1."""
    return {route: parse_composition(route) for route in sorted(set(routes)) if members(route) - {route}}
