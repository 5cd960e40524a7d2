"""Draw every figure for which results/ has the data. Run by `make figures`.

Figures of the run itself go to results/figures/, as the last stage draws them. Figures of several runs go to
results/studies/. With --width and --out, all go to another folder, for example as wide as a column of a paper. Two
processes draw; they are forked after the libraries are imported, which takes a fifth of the time.
"""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import study_figures

from captrain.errors import UserError
from captrain.reporting import figures, style
from captrain.run import entry_point

RESULTS = Path("results")
LEAST, MOST = 3.0, 14.0
"""Widths in inches that the figures are made for."""


@partial(entry_point, stage=False)
def main() -> None:
    """Draw all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=float, default=style.WIDTH, help="of each figure, in inches")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for figures/ and studies/")
    options = parser.parse_args()
    width, places = options.width, (options.out / "figures", options.out / "studies")
    if not LEAST <= width <= MOST:
        raise UserError(f"--width must be between {LEAST:g} and {MOST:g} inches, got {width:g}", "name another width")
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        drawings = [
            pool.submit(figures.draw, RESULTS, places[0], width),
            *(pool.submit(study_figures.draw, RESULTS, places[1], [name], width) for name in study_figures.STUDIES),
        ]
        paths = [path for drawing in drawings for path in drawing.result()]
    print(f"{len(paths)} files in {places[0]}/ and {places[1]}/")


if __name__ == "__main__":
    main()
