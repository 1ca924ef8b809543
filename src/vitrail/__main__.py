"""`python -m vitrail` is `vitrail`."""

import sys

from vitrail.cli import main

sys.exit(main())
