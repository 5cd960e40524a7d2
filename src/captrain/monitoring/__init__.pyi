from .integrity import check_integrity as check_integrity
from .provenance import stage_states as stage_states
from .runs import compare_runs as compare_runs
from .runs import find_run as find_run
from .verification import verify as verify
from .watch import Watch as Watch
