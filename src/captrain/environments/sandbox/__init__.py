"""The sandbox: environments that nobody has vouched for, run in processes that can reach nothing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
