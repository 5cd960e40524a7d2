"""The static report of a run: a page that opens from a disk, without a server, a network or a build step."""

from captrain.reporting.pages.site import build

__all__ = ["build"]
