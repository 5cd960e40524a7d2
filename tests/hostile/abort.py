"""Crashes."""

import os


def attack(argument):
    os.abort()
