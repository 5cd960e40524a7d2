from .clock import TIMES as TIMES
from .clock import times as times
from .entry import entry_point as entry_point
from .fingerprint import code_digest as code_digest
from .launch import dispatched as dispatched
from .launch import run as run
from .locks import exclusive as exclusive
