from .figures import capabilities as capabilities
from .figures import draw as draw
from .runs import compare_runs as compare_runs
from .runs import find_run as find_run
from .style import render as render
from .verdicts import DIFFERS as DIFFERS
from .verdicts import VERDICTS as VERDICTS
from .verification import verify as verify
