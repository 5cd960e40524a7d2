"""Projects of users: created in an empty folder, run by captrain's stages, upgraded to another version."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
