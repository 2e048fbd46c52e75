"""Make the order cache of a run before it starts: `python tools/build_order.py [experiment=NAME] [data.KEY=VALUE ...]`.

Takes the same settings as pretrain_gpt.py. Only large sources, or any with data.cache set, keep their order on disk.
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    """Exit code: 0 done, 2 a request that can't be met."""
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    from megadcp.config.check import UserError
    from megadcp.config.load import compose
    from megadcp.data.order import build_cache

    try:
        config = compose(argv)
        build_cache(config.data, config.run.steps, print)
    except UserError as error:
        print(f"build_order: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
