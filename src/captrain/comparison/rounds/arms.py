"""Names of the adapters that are taught in rounds, as rows, routes and tables use them."""

GENERALIST = "solutions"
"""The arm of the adapter over all environments, which is the row's, and the stage that leaves all of them."""
ROUTED = "solutions_routed"
"""The column of routes among base, specialists and generalist."""


def specialist_name(capability: str) -> str:
    """Name the arm of a capability's specialist."""
    return f"{GENERALIST}:{capability}"
