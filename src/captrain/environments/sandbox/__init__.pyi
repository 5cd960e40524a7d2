from .confined import LAYERS as LAYERS
from .confined import LEVELS as LEVELS
from .confined import Confinement as Confinement
from .confined import active_confinement as active_confinement
from .confined import load_confined as load_confined
from .forkserver import MODULES as MODULES
from .forkserver import installed_packages as installed_packages
