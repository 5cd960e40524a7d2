"""Draw the figures from results/."""

from pathlib import Path

from captrain.reporting import draw
from captrain.run import entry_point


@entry_point
def main() -> str:
    return f"{len(draw(Path('results'), Path('results/figures')))} files in results/figures"


if __name__ == "__main__":
    main()
