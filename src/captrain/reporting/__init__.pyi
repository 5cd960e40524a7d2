from .figures import capabilities as capabilities
from .figures import draw as draw
from .published import claims as claims
from .published import shown as shown
from .style import render as render
