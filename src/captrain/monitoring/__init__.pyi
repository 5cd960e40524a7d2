from .provenance import stage_states as stage_states
from .verification import verify as verify
from .watch import Watch as Watch
