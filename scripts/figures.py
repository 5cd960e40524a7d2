"""Draw every figure that results/ holds the data of. Run by `make figures`.

The run's own go to results/figures/, as the pipeline's last stage draws them; those of several runs go to
results/studies/.
"""

from functools import partial
from pathlib import Path

from captrain.execution import entry_point
from captrain.reporting import figures, studies


@partial(entry_point, stage=False)
def main() -> None:
    results = Path("results")
    paths = [*figures.draw(results, results / "figures"), *studies.draw(results, results / "studies")]
    print(f"{len(paths)} files in results/figures/ and results/studies/")


if __name__ == "__main__":
    main()
