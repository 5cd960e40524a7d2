from .figures import capabilities as capabilities
from .figures import draw as draw
from .published import claims as claims
from .published import published_tables as published_tables
from .published import read_published as read_published
from .style import render as render
