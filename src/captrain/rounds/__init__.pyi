from .rediscovery import REDISCOVERY_COLUMNS as REDISCOVERY_COLUMNS
from .teaching import GENERALIST as GENERALIST
from .teaching import ROUTED as ROUTED
from .teaching import publish_teaching as publish_teaching
from .teaching import specialist_name as specialist_name
from .teaching import teach_in_rounds as teach_in_rounds
