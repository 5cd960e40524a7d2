"""captrain: find the capabilities an LLM agent lacks, train one LoRA adapter for each, route tasks to them.

Implements TRACE (arXiv 2604.05336) as a cached, resumable pipeline. Data flows one way through the packages: spec ->
rollouts -> labels -> capabilities -> environments -> adapters -> routes -> evaluation -> figures -> report. Importing
captrain or one of its packages is cheap: an exported name (`__init__.pyi`) is imported on first use, and heavy
libraries such as torch inside the functions that need them.
"""

import os
import signal
import sys
import threading

import lazy_loader

_folder, _script = os.path.split((getattr(sys, "argv", None) or [""])[0])
_is_stage = "DVC_STAGE" in os.environ and os.path.basename(_folder) == "stages"
if (
    (_is_stage or _script in ("captrain", "captrain-sweep"))
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    # Ctrl-C during the imports of a stage or command ends it without a traceback, until `entry_point` handles it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `captrain run` starts its stages with it blocked

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.2.0"
