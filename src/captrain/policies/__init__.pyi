from .engine import Row as Row
from .engine import run as run
from .local import LocalPolicy as LocalPolicy
from .local import merged as merged
from .policy import Play as Play
from .policy import Policy as Policy
from .policy import load_policy as load_policy
from .turns import TurnPolicy as TurnPolicy
