"""Monitoring of a pipeline: its running stages, their progress, and whether its results are the committed code's."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
