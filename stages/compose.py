"""Compose results/spec.yaml from params.yaml and conf/, with digests of the code that each stage then runs."""

from pathlib import Path

from captrain.projects import code_digests
from captrain.run import compose_spec, entry_point, load_choice, publish_spec


@entry_point
def main() -> str:
    choice = load_choice(Path("params.yaml"))
    composed = compose_spec(choice.experiment, choice.seed, choice.overrides, Path("conf"))
    publish_spec(composed, Path("results/spec.yaml"), code_digests(composed))
    return f"experiment {choice.experiment}, seed {choice.seed}" + "".join(f", {text}" for text in choice.overrides)


if __name__ == "__main__":
    main()
