from .gathering import rows_of as rows_of
from .gathering import write as write
from .points import WORKSPACES as WORKSPACES
from .points import Point as Point
