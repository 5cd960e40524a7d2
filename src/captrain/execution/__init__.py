"""Execution of work and its identity: processes, Slurm jobs, fingerprints of code, entry points."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
