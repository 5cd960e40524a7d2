from .arms import GENERALIST as GENERALIST
from .arms import ROUTED as ROUTED
from .arms import specialist_name as specialist_name
from .rediscovery import REDISCOVERY_COLUMNS as REDISCOVERY_COLUMNS
from .teaching import publish_teaching as publish_teaching
from .teaching import teach_in_rounds as teach_in_rounds
