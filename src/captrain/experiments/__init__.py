"""The pipeline many times over: points of a sweep or of a replication, and what they come to together."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
