"""Takes each private name of another package away from nbdist in turn, and runs a session without it.

    python -m tests.stress.missing_names [NAME...]

Ten seconds a name. Prints what the session lacked each time; exits with 1 if the name is not listed for that.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from testbed.kernel import kernel_with_ranks
from tests.integration.test_private_names import BARRIER, INTERRUPTED, TROUBLE, interrupted, lives, trains
from tests.support.private_names import UNFREED, UNMEASURED, UNNOTICED, UNRENEWED, without


def main(names: list[str]) -> int:
    """Return the exit code."""
    failed = 0
    for name in names or [*UNNOTICED, *UNMEASURED, *UNRENEWED, *UNFREED]:
        try:
            found, expected = lacks_without(name), listed(name)
        except AssertionError as error:
            found, expected = f"failed: {error}", ""
        failed += found != expected
        print(f"{'ok  ' if found == expected else 'FAIL'} {name}: {found or 'nothing'}", flush=True)
    return bool(failed)


def listed(name: str) -> str:
    """What a session lacks without a name, in the words of `lacks_without`."""
    if name in UNMEASURED:
        return "steps"
    return "groups" if name in UNRENEWED else ""


def lacks_without(name: str) -> str:
    """Run a session, and return what it lacked; of the names in UNFREED, all but the interrupt of a collective."""
    with tempfile.TemporaryDirectory() as folder, kernel_with_ranks(2, **without([name])) as kernel:
        shown = lives(kernel, Path(folder))
        if "steps can't be measured" in shown:
            return "steps"
        if "FLOPS a rank" not in shown or TROUBLE.search(shown):
            return shown
        if name in UNFREED:
            return ""
        assert interrupted(kernel, BARRIER).startswith(INTERRUPTED)
        if "StaleGroupError" in kernel.run("%%distributed\nnbdist.wait_for_everyone()").evalue:
            kernel.ok("%distributed restart")
            trains(kernel)
            return "groups"
        trains(kernel)
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
