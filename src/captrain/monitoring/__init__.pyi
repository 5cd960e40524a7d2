from .provenance import stage_states as stage_states
from .provenance import verify as verify
from .watch import Watch as Watch
