"""Program of an agent's first process. It imports nothing, because every client of `sky.Local()` needs its text."""

BOOT = """
import sys
sys.path[:] = sys.argv[1:]
from skyward.node.agent.main import main
sys.exit(main())
"""
