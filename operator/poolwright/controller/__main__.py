"""`python -m poolwright.controller`: the operator."""

import sys

from poolwright.controller.app import main

if __name__ == "__main__":
    sys.exit(main())
