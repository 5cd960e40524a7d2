"""Policies that act: a model in this process or behind a server, or a script."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
