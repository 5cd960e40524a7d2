"""Draw the figures from results/ alone."""

from pathlib import Path

from captrain.errors import entry_point
from captrain.figures import draw


@entry_point
def main() -> None:
    draw(Path("results"), Path("results/figures"))


if __name__ == "__main__":
    main()
