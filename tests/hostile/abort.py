"""Breaks down."""

import os


def attack(argument):
    os.abort()
