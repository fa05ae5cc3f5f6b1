"""`python -m poolwright_engine`: the command line."""

import sys

from poolwright_engine.cli.main import main

sys.exit(main())
