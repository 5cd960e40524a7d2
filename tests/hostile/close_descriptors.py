"""Closes all that is open, and stays."""

import os
import time


def attack(argument):
    os.closerange(0, 64)
    time.sleep(60)
