"""The static report of a run: pages that open from a disk, without a server, a network or a build step."""

from captrain.reporting.pages.site import build

__all__ = ["build"]
