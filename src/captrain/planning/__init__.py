"""Plans: the cost of a configuration and its feasibility, before anything is spent."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
