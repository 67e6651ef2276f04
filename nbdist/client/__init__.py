"""Everything inside the notebook kernel: magics > costs > session > output."""

from nbdist.client.costs import history
from nbdist.client.ranks import observers

observers.subscribe(history.of_notebook)  # cells that run on ranks are always kept
