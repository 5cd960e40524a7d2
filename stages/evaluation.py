"""Play the test split with the arms of one row: `python stages/evaluation.py ROW`."""

import sys
from functools import partial
from pathlib import Path

from captrain.comparison import play_row, publish_row
from captrain.records import counted
from captrain.run import entry_point, load_spec

ROW = sys.argv[1].removeprefix("evaluation@")


@partial(entry_point, name=f"evaluation@{ROW}")
def main() -> str:
    """Adapters and routes of the row -> artifacts/played/ROW."""
    played = play_row(load_spec(), ROW)
    publish_row(played, Path("artifacts/played", ROW))
    return f"{counted(len(played.rollouts), 'rollout')} on the test split"


if __name__ == "__main__":
    main()
