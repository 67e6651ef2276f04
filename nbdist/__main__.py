"""`python -m nbdist` is the command `nbdist`."""

import sys

from nbdist.command import main

sys.exit(main())
