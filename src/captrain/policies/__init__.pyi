from .engine import EngineRow as EngineRow
from .engine import sample_rows as sample_rows
from .local import LocalPolicy as LocalPolicy
from .local import with_adapter as with_adapter
from .policy import Play as Play
from .policy import Policy as Policy
from .policy import load_policy as load_policy
from .turns import TurnPolicy as TurnPolicy
