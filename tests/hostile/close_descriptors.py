"""Closes all file descriptors, and keeps running."""

import os
import time


def attack(argument):
    os.closerange(0, 64)
    time.sleep(60)
