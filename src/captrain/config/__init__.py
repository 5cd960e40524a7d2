"""The configuration: composed once from conf/, checked against one typed schema, read by every stage."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
