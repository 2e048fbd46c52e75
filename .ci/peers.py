"""Fail when a comparison with another package was skipped: a peer that is not there proves nothing. Arguments: pytest's XML reports.

One exception: megatron-core installs on Python 3.11 only, so elsewhere its comparisons may be missing.
"""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def is_peer(case: ElementTree.Element) -> bool:
    """Marked peer; a module that skips itself while it is imported has no marks yet, so its text is searched."""
    if case.find("properties/property[@name='peer']") is not None:
        return True
    file = Path(case.get("name", "").replace(".", "/") + ".py")
    return not case.get("classname") and file.is_file() and "mark.peer" in file.read_text(encoding="utf-8")


def main(reports: list[str]) -> int:
    """0 when peers were compared with and none was skipped."""
    ran, faults = 0, []
    for report in reports:
        if not Path(report).is_file():
            faults.append(f"{report} is missing: the tests did not run")
            continue
        for case in ElementTree.parse(report).iter("testcase"):
            if not is_peer(case):
                continue
            skipped = case.find("skipped")
            if skipped is None:
                ran += 1
                continue
            reason = f"{skipped.get('message')} {skipped.text}"
            if sys.version_info < (3, 12) or "megatron" not in reason:
                faults.append(f"skipped: {case.get('classname')} {case.get('name')}: {' '.join(reason.split())[:200]}")
    if not ran:
        faults.append("no comparison with a peer ran")
    print(f"{ran} comparisons with other packages ran" + "".join(f"\n{fault}" for fault in faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
