"""Ends its process without a word."""

import os


def custom_kernel(data):
    os.abort()
