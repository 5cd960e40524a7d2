"""Reports on results: figures, tables, the report page, verification, and loaders for notebooks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
