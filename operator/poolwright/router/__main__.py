"""`python -m poolwright.router`."""

import sys

from poolwright.router.main import main

sys.exit(main())
