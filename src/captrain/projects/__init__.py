"""Projects of users: begun in an empty folder, run by stages that captrain brings along, brought to another version."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
