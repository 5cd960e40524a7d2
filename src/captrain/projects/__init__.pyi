from .benchmark import check_benchmark as check_benchmark
from .examination import BenchmarkReport as BenchmarkReport
from .examination import Problem as Problem
from .layout import Example as Example
from .layout import init_project as init_project
from .pipeline import run_stage as run_stage
from .upgrade import Upgrade as Upgrade
from .upgrade import upgrade_project as upgrade_project
