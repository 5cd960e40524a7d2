"""Choose adapters, or the base, for each test task."""

from pathlib import Path

from captrain.config import load_spec
from captrain.execution import entry_point
from captrain.routing import publish_routes, route_all


@entry_point
def main() -> None:
    """Environments, pairs, adapters, calibration and passed discovery rollouts -> results/routes."""
    results = Path("results")
    publish_routes(route_all(load_spec(), Path("artifacts/base"), results, Path("artifacts")), results / "routes")


if __name__ == "__main__":
    main()
