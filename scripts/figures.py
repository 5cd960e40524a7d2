"""Draw every figure that results/ holds the data of. Run by `make figures`.

The run's own go to results/figures/, as the pipeline's last stage draws them; those of several runs go to
results/studies/. Two processes draw, of which one takes the run's own and each the next of the others: they are forked
once the libraries are there, which take a fifth of the time.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import study_figures

from captrain.reporting import figures
from captrain.run import entry_point

RESULTS = Path("results")


@partial(entry_point, stage=False)
def main() -> None:
    """Draw all."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        drawings = [
            pool.submit(figures.draw, RESULTS, RESULTS / "figures"),
            *(pool.submit(study_figures.draw, RESULTS, RESULTS / "studies", [name]) for name in study_figures.STUDIES),
        ]
        paths = [path for drawing in drawings for path in drawing.result()]
    print(f"{len(paths)} files in results/figures/ and results/studies/")


if __name__ == "__main__":
    main()
