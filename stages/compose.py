"""Compose results/spec.yaml from params.yaml and conf/."""

from pathlib import Path

from captrain.run import compose_spec, entry_point, load_choice, publish_spec


@entry_point
def main() -> str:
    choice = load_choice(Path("params.yaml"))
    composed = compose_spec(choice.experiment, choice.seed, choice.overrides, Path("conf"))
    publish_spec(composed, Path("results/spec.yaml"))
    return f"experiment {choice.experiment}, seed {choice.seed}" + "".join(f", {text}" for text in choice.overrides)


if __name__ == "__main__":
    main()
