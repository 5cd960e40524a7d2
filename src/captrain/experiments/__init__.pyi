from .gathering import TableRow as TableRow
from .gathering import point_rows as point_rows
from .gathering import read_rows as read_rows
from .gathering import write_table as write_table
from .points import WORKSPACES as WORKSPACES
from .points import Point as Point
