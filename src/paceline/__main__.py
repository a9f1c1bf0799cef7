"""`python -m paceline` is the `paceline` command."""

import sys

from paceline.cli import main

sys.exit(main())
