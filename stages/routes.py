"""Route each test task to adapters or to the base."""

from pathlib import Path

from captrain.routing import publish_routes, route_all
from captrain.run import entry_point, load_spec


@entry_point
def main() -> None:
    """Environments, pairs, adapters, calibration and passed discovery rollouts -> results/routes."""
    results = Path("results")
    publish_routes(route_all(load_spec(), Path("artifacts/base"), results, Path("artifacts")), results)


if __name__ == "__main__":
    main()
