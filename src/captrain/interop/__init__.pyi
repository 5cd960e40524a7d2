from .logs.reading import Logs as Logs
from .trajectories import Inexpressible as Inexpressible
from .trajectories import atif as atif
from .trajectories import messages_of as messages_of
from .trajectories import read as read
from .trajectories import tools_of as tools_of
