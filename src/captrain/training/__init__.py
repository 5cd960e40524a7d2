"""One adapter from one job: GRPO and fine-tuning with TRL, distillation, merging, in one process or several."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
