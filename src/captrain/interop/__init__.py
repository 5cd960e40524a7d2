"""Other tools' formats: reads their logs and trajectories, exports rollouts and environments."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
