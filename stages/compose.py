"""Derive results/spec.yaml from what params.yaml selects and conf/ defines."""

from pathlib import Path

from captrain.config import spec
from captrain.execution import entry_point


@entry_point
def main() -> None:
    choice = spec.choice(Path("params.yaml"))
    composed = spec.compose(choice.experiment, choice.seed, choice.overrides, Path("conf"))
    spec.dump(composed, Path("results/spec.yaml"))


if __name__ == "__main__":
    main()
