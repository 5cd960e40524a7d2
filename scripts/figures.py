"""Draw every figure for which results/ has the data. Run by `make figures`.

Figures of the run itself go to results/figures/, as the last stage draws them. Figures of several runs go to
results/studies/. Two processes draw; they are forked after the libraries are imported, which takes a fifth of the time.
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
    """Draw all figures."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        drawings = [
            pool.submit(figures.draw, RESULTS, RESULTS / "figures"),
            *(pool.submit(study_figures.draw, RESULTS, RESULTS / "studies", [name]) for name in study_figures.STUDIES),
        ]
        paths = [path for drawing in drawings for path in drawing.result()]
    print(f"{len(paths)} files in results/figures/ and results/studies/")


if __name__ == "__main__":
    main()
