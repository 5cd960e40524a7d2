"""Draw the figures from results/."""

from pathlib import Path

from captrain.records import counted
from captrain.reporting import draw
from captrain.run import entry_point


@entry_point
def main() -> str:
    files = draw(Path("results"), Path("results/figures"))
    return f"{counted(len(files), 'file')} in results/figures"


if __name__ == "__main__":
    main()
