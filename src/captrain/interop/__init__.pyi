from .export import export_rollouts as export_rollouts
from .logs.reading import Logs as Logs
from .logs.reading import read_logs as read_logs
from .trajectories import Inexpressible as Inexpressible
from .trajectories import atif_document as atif_document
from .trajectories import messages_of as messages_of
from .trajectories import read_trajectories as read_trajectories
from .trajectories import tools_of as tools_of
