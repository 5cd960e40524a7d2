from .agents.collection import play as play
from .diagnosis.notebook import NotebookDiagnosis as NotebookDiagnosis
from .diagnosis.notebook import diagnose as diagnose
from .reporting.loaders import load_adapters as load_adapters
from .reporting.loaders import load_capabilities as load_capabilities
from .reporting.loaders import load_differences as load_differences
from .reporting.loaders import load_history as load_history
from .reporting.loaders import load_kinds as load_kinds
from .reporting.loaders import load_labels as load_labels
from .reporting.loaders import load_ledger as load_ledger
from .reporting.loaders import load_main as load_main
from .reporting.loaders import load_outcomes as load_outcomes
from .reporting.loaders import load_passports as load_passports
from .reporting.loaders import load_published as load_published
from .reporting.loaders import load_rollouts as load_rollouts
from .reporting.loaders import load_routes as load_routes
from .reporting.loaders import load_selection as load_selection
from .reporting.loaders import load_spec as load_spec

__all__: list[str]
__version__: str
