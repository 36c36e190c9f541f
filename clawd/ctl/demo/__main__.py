# SPDX-License-Identifier: Apache-2.0
"""`python -m clawd.ctl.demo`."""

import signal
import sys


def main() -> int:
    # a Ctrl-C while modules load ends this quietly: nothing was started that needs tidying up
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from clawd.ctl.demo.command import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
