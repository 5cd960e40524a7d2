"""A run: its configuration, its machine, its processes and jobs, and the identity of its code."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
